"""What an instance of each class has, by release: every attribute with its value, every method with its parameters.

    python tests/sweeps/releases/attributes.py           # in the environment of each release, and attributes.json anew
    python tests/sweeps/releases/attributes.py --here FILE      # of the transformers that is installed

An instance is looked at when it is made, within an update, and after a training with evaluations: some names come late.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TABLE = HERE / "attributes.json"
CLASSES = (
    "Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments", "TrainerState", "TrainerControl",
    "CallbackHandler",
)  # fmt: skip
MOMENTS = ("made", "update", "trained")
LONGEST = 60
HERE_NAME = "here"  # in place of a release
RAISES = "raises"
# Of this machine, of this moment, or of the folder that was given: what they hold is no fact about a release.
VARYING = frozenset(
    {"logging_dir", "output_dir", "run_name", "device", "distributed_state", "train_dataset", "_signature_columns"}
)
Found = str | list[str]  # the text of a value, or a method's parameters
Rows = dict[str, dict[str, Found | dict[str, Found]]]  # name → release → what it is; by moment where that varies


def shown(name: str, value: object) -> str:
    """Return a value as text: what is plain as Python writes it, anything else by its class."""
    if name in VARYING:
        return "varies"
    if isinstance(value, Enum):
        value = value.value
    if _is_plain(value) and len(repr(value)) <= LONGEST:
        return repr(value)
    return f"<{type(value).__name__}>"


def _is_plain(value: object) -> bool:
    if isinstance(value, (dict, list, tuple, set)):
        return all(map(_is_plain, (*value.values(), *value) if isinstance(value, dict) else value))
    return value is None or type(value) in (bool, int, str)


def parameters(method: object) -> list[str]:
    """Return a method's parameters by name; those that take any have stars, those by keyword alone a colon."""
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    marks[inspect.Parameter.KEYWORD_ONLY] = ":"
    given = inspect.signature(method).parameters.values()
    return [f"{marks.get(one.kind, '')}{one.name}" for one in given]


def looked_at(instance: object, names: Iterable[str] = ()) -> dict[str, Found]:
    """Return what an instance has: the parameters of each method, the text of each other value.

    Args:
        instance: The instance.
        names: What is looked for besides `dir()`.
    """
    found: dict[str, Found] = {}
    for name in {*dir(instance), *names}:
        if name.startswith("__"):
            continue
        try:
            value = getattr(instance, name)
        except Exception as error:  # a property that asks for something that is not there, or a name that is not
            found[name] = f"{RAISES} {type(error).__name__}: {str(error).rpartition('Hint: ')[2]}"
            continue
        found[name] = parameters(value) if inspect.isroutine(value) else shown(name, value)
    return found


def found_in(
    package: ModuleType, folder: str, names: Mapping[str, Iterable[str]] | None = None
) -> dict[str, dict[str, dict[str, Found]]]:
    """Train with both trainers of a package; return what the instances of each class had at each moment.

    Args:
        package: `transformers`, or `hf_compat`.
        folder: Where the runs save.
        names: What is looked for in each class, besides `dir()`.
    """
    from helpers import toy

    found: dict[str, dict[str, dict[str, Found]]] = {}

    def look(trainer: object, moment: str) -> None:
        for name, instance in (
            (kind, trainer),
            (f"{kind.removesuffix('Trainer')}TrainingArguments", trainer.args),
            ("TrainerState", trainer.state),
            ("TrainerControl", trainer.control),
            ("CallbackHandler", trainer.callback_handler),
        ):
            found.setdefault(name, {}).setdefault(moment, looked_at(instance, (names or {}).get(name, ())))

    for kind in ("Trainer", "Seq2SeqTrainer"):
        base = getattr(package, kind)

        class Looking(base):
            def training_step(self, model, inputs, *args, **kwargs):
                look(self, "update")
                return super().training_step(model, inputs, *args, **kwargs)

        of_arguments = getattr(package, f"{kind.removesuffix('Trainer')}TrainingArguments")
        evaluating = "eval_strategy" if "eval_strategy" in of_arguments.__dataclass_fields__ else "evaluation_strategy"
        words = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2, evaluating: "epoch"}
        args = of_arguments(os.path.join(folder, kind), **words)
        trainer = Looking(toy.Classifier(), args, train_dataset=toy.rows(16), eval_dataset=toy.rows(8))
        look(trainer, "made")
        trainer.train()
        look(trainer, "trained")
    return found


def as_rows(of_releases: Mapping[str, dict]) -> dict[str, Rows]:
    """Return, by class and name, what each release says; where all moments say the same, once."""
    rows: dict[str, Rows] = {}
    for release, classes in of_releases.items():
        for kind, moments in classes.items():
            for name in sorted({name for found in moments.values() for name in found}):
                said = {moment: moments[moment][name] for moment in MOMENTS if name in moments[moment]}
                row = rows.setdefault(kind, {}).setdefault(name, {})
                values = list(said.values())
                one = values[0] if len(said) == len(MOMENTS) and all(v == values[0] for v in values) else said
                row[release] = one
    return rows


def written(table: Mapping[str, Rows]) -> str:
    """Return the table as JSON, a name a line."""
    classes = []
    for kind, rows in table.items():
        lines = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
        classes.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(classes) + "\n}\n"


# Why ours has another value than a release, or takes other parameters. What is absent says so itself, when it is read.
_DEFAULT = "a default of that release: arguments that it makes, `run` and `patch()` have it"
_AS_5_23 = "a default of 5.23, which older releases have in another form"
_OF_ARGUMENTS = {
    **dict.fromkeys(("average_tokens_across_devices", "default_optim", "optim", "trackio_space_id"), _DEFAULT),
    **dict.fromkeys(("fsdp", "fsdp_config", "hub_private_repo", "lr_scheduler_kwargs"), _AS_5_23),
    "include_num_input_tokens_seen": "False and 'no' are one value, and today's form is the text",
    "evaluation_strategy": "it reads `eval_strategy`; 4.46 gives None unless it was set by this name",
    "local_rank": "the rank beside 4.x, -1 beside 5.x, as upstream (docs/releases.md)",
    "no_cuda": "it reads `use_cpu`; 4.x gives False unless it was set by this name",
    "place_model_on_device": "True beside releases that say so, None beside 5.23: the Trainer decides",
    "warmup_ratio": "0.0 as in 4.x; 5.0 gives None",
    "set_dataloader": "5.23 has two parameters more, before the last three",
    "set_lr_scheduler": "4.x has `warmup_ratio` before `warmup_steps`: a count at the last place is one of updates",
    "set_training": "5.23 has `activation_checkpointing` before `gradient_checkpointing`, which means the same",
}
_OF_TRAINERS = {
    "_mixed_mesh_grads": "no tensor is shared between devices: None and False say the same",
    "gather_function": "the method itself, which takes `use_gather_object`, too",
    **dict.fromkeys(
        ("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"), "False as until 5.0; 5.23 has None"
    ),
}
REASONS: dict[str, dict[str, str]] = {
    "Trainer": _OF_TRAINERS,
    "Seq2SeqTrainer": _OF_TRAINERS,
    "TrainingArguments": _OF_ARGUMENTS,
    "Seq2SeqTrainingArguments": _OF_ARGUMENTS,
    "TrainerState": {"epoch": "0 before a training, as 5.23; None until 5.0"},
}


def differences(table: Mapping[str, Rows], ours: Mapping[str, Rows]) -> Iterator[tuple[str, str, str]]:
    """Yield class, name and words for whatever a release has and ours has not, or has otherwise."""
    for kind, rows in table.items():
        for name, of_releases in rows.items():
            here = ours[kind].get(name, {}).get(HERE_NAME)
            for release, there in of_releases.items():
                said = unlike(there, here)
                if said:
                    yield kind, name, f"{release}: {said}"


def unlike(there: Found | dict[str, Found], here: Found | dict[str, Found] | None) -> str:
    """Return in which way ours differs from a release's; nothing where it does not."""
    if isinstance(there, dict) or isinstance(here, dict):
        of_there = there if isinstance(there, dict) else dict.fromkeys(MOMENTS, there)
        of_here = here if isinstance(here, dict) else dict.fromkeys(MOMENTS, here)
        said = {moment: unlike(value, of_here.get(moment)) for moment, value in of_there.items()}
        return "; ".join(f"{moment}: {one}" for moment, one in said.items() if one)
    if isinstance(there, list) and isinstance(here, list):
        return unaccepted(there, here)
    if there == here or (str(there).startswith("<") and str(here).startswith("<")):  # objects of other classes
        return ""
    return f"{there}, here {here}"


def unaccepted(there: list[str], here: list[str]) -> str:
    """Return the parameters that a release's method takes and ours does not, or at another place."""
    if here[-2:] == ["*args", "**kwargs"]:
        return ""
    by_name = [name.lstrip(":") for name in here]
    named = [name.lstrip(":") for name in there if not name.startswith("*")]
    lacking = [name for name in named if name not in by_name and by_name[-1:] != ["**kwargs"]]
    by_place = [
        name
        for place, name in enumerate(there)
        if name in by_name and name[0] not in ":*" and by_name.index(name) != place
    ]
    return ", ".join([*(f"no {name}" for name in lacking), *(f"{name} at another place" for name in by_place)])


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        import transformers

        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory() as folder:
            Path(sys.argv[2]).write_text(json.dumps(found_in(transformers, folder)))
        return
    from sweeps.releases.environments import FOLDER, OF_ATTRIBUTES, python_of

    with tempfile.TemporaryDirectory() as folder:
        of_releases = {}
        for name, release in OF_ATTRIBUTES.items():
            file = Path(folder) / f"{name}.json"
            command = [str(python_of(release, FOLDER)), __file__, "--here", str(file)]
            subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            of_releases[name] = json.loads(file.read_text())
    TABLE.write_text(written(as_rows(of_releases)))
    print(f"written: {TABLE}")


if __name__ == "__main__":
    main()
