"""`hf-compat explain` shows what training arguments become, those of a command line or of a script."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, DataError
from hf_compat.tools.commands.isolated import add_options, call_again
from hf_compat.tools.terminal import show

if TYPE_CHECKING:
    from hf_compat.tools.explanation import Explanation
    from hf_compat.tools.until_train import CapturedTrain

_LARGE_MODEL = 10**7  # parameters from which on memory and traffic are worth a line


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the options, without the words after them."""
    parser = argparse.ArgumentParser(
        prog="hf-compat explain",
        description="Say what training arguments become. Of a script: it runs up to its first `train()`, which is not "
        "carried out; the arguments are those of its Trainer. Exit status: 0 explained, 1 an argument is refused, 2 "
        "the script did not reach its `train()`.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--world-size", type=int, help="as if so many processes were launched; no GPU is needed")
    parser.add_argument("--per-node", type=int, default=8, help="processes of a machine (default: 8)")
    parser.add_argument("--compat", choices=("4", "5"), help="generation of transformers whose defaults count")
    parser.add_argument("--parameters", type=float, help="of the model, 7e9 say: adds memory, traffic, checkpoints")
    parser.add_argument("--trained", type=float, help="of these, where not all are trained, as with LoRA")
    add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="the first word is a module, as in `python -m`")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    parser = make_parser()
    # The words after a script are the script's, while options may stand among arguments
    of_script = argparse.ArgumentParser(
        parents=[parser], prog=parser.prog, description=parser.description, allow_abbrev=False, add_help=False
    )
    of_script.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="name=value | SCRIPT", help="bf16=true max_steps=10"
    )
    chosen = of_script.parse_args(list(words))
    first = chosen.words[0] if chosen.words else ""
    is_script = bool(chosen.module)
    if first and not (chosen.module or "=" in first or first.startswith("-")):
        if first.endswith(".ipynb") or (first.endswith(".py") and not os.path.exists(first)):
            from hf_compat.interop.user_script import require_script

            require_script(first, "hf-compat explain SCRIPT [arguments]")
        is_script = os.path.exists(first)
    if not is_script:
        chosen, chosen.words = parser.parse_known_args(list(words))
    for name, count in (("--world-size", chosen.world_size), ("--per-node", chosen.per_node)):
        if count is not None and count < 1:
            raise ArgumentError(f"`{name} {count}` is not a number of processes.\n\nHint: write 1 or more.")
    status = call_again("explain", words, chosen, first) if is_script else None
    if status is not None:
        return status
    explanation, about = _of_script(chosen) if is_script else (_of_pairs(chosen), {})
    if chosen.json:
        show([json.dumps({**json.loads(explanation.to_json()), **about}, indent=2)])
    else:
        lines = [f"{name.replace('_', ' ')}: {value}" for name, value in about.items()]
        show([*lines, *([""] if lines else []), str(explanation)])
    return 0 if explanation.plan is not None else 1


def _assumed(chosen: argparse.Namespace) -> AbstractContextManager[None]:
    from hf_compat.runtime.launch import Launch, assuming

    world = chosen.world_size
    launch = Launch(world_size=world or 1, local_world_size=min(chosen.per_node, world or 1))
    return assuming(launch, "cuda:0") if world else contextlib.nullcontext()


def _of_script(chosen: argparse.Namespace) -> tuple[Explanation, dict[str, object]]:
    """Explain the arguments of a script's Trainer, and describe that Trainer."""
    from hf_compat.hf.arguments_rules import VARIABLE
    from hf_compat.runtime.launch import environment
    from hf_compat.tools.until_train import UserScript, run_until_train

    if not chosen.words:
        raise ArgumentError("`-m` names no module.\n\nHint: `hf-compat explain -m MODULE [arguments]`.")
    if chosen.compat is not None:
        environment[VARIABLE] = chosen.compat
    script = UserScript(path=chosen.words[0], arguments=tuple(chosen.words[1:]), is_module=chosen.module)
    # The script's output does not belong to the answer
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        return run_until_train(script, lambda captured: _of_trainer(captured, chosen), {"output_dir": scratch})


def _of_trainer(captured: CapturedTrain, chosen: argparse.Namespace) -> tuple[Explanation, dict[str, object]]:
    from hf_compat.tools.explanation import explain
    from hf_compat.trainer_methods.run_parts import run_parts

    trainer = captured.trainer
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    counts, data = None, "no training data"
    if trainer.train_dataset is not None:
        try:
            counts = trainer.run_counts(trainer.args, trainer.get_train_dataloader())
            epochs = (
                "" if counts.is_endless else f" in {counts.num_train_epochs} epoch(s) of {counts.updates_per_epoch}"
            )
            data = f"{counts.max_updates} updates{epochs}, {counts.total_train_batch_size} samples each"
        except (ArgumentError, DataError) as error:
            data = str(error).partition("\n")[0]
    with _assumed(chosen):
        args = dataclasses.replace(trainer.args) if chosen.world_size else trainer.args
        told_size = chosen.parameters or (size if size >= _LARGE_MODEL else None)
        explanation = explain(
            args,
            None if chosen.world_size else counts,  # the counts of the real processes
            parameters=told_size,
            trained=chosen.trained or (None if chosen.parameters else trained),
            parts=run_parts(trainer),
        )
    about: dict[str, object] = {
        "trainer": type(trainer).__name__,
        "model": f"{type(trainer.model).__name__}, {size:,} parameters",
        "run": data,
    }
    # Leave out the output folder, which is not the script's
    listed = tuple(one for one in explanation.arguments if one.name != "output_dir")
    plan = explanation.plan
    if plan is not None:
        plan = dataclasses.replace(plan, default_root_dir="(the output folder)")
    return dataclasses.replace(explanation, arguments=listed, plan=plan), about


def _of_pairs(chosen: argparse.Namespace) -> Explanation:
    from hf_compat.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
    from hf_compat.hf.legacy import OLD_NAMES, remembered
    from hf_compat.tools.explanation import explain

    values: dict[str, object] = {}
    for pair in chosen.words:
        name, equals, text = pair.lstrip("-").partition("=")
        if not equals:
            raise ArgumentError(f"{pair!r} is not name=value.\n\nHint: write e.g. learning_rate=1e-4.")
        values[name] = _value(text)
    values |= {} if chosen.compat is None else {"compat": _value(chosen.compat)}
    plain = {one.name for one in dataclasses.fields(TrainingArguments)}
    added = {one.name for one in dataclasses.fields(Seq2SeqTrainingArguments)} - plain
    kind = Seq2SeqTrainingArguments if values.keys() & added else TrainingArguments
    with _assumed(chosen):
        args = kind(**values)  # type: ignore[arg-type]  # it checks the values itself
        explanation = explain(args, parameters=chosen.parameters, trained=chosen.trained)
    given = set(values)
    for name, value in remembered(args).items():
        given |= OLD_NAMES[name].translate(value).keys()
    # Without those that follow from the given ones
    listed = tuple(argument for argument in explanation.arguments if argument.name in given)
    return dataclasses.replace(explanation, arguments=listed)


def _value(text: str) -> object:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (json.JSONDecodeError, RecursionError):
        return text
