"""Every argument reads its value when it is made and when it is set: types, ranges, choices, numbers as text."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from helpers import toy
from hf_compat import HfArgumentParser, Trainer, TrainingArguments, explain
from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.hf import argument_values
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.fields import TrainingFields
from hf_compat.hf.rows import OWN_ARGUMENTS, OwnArgument, Row

# Argument, what is given, what is meant; None where it is refused.
READ = [
    ("learning_rate", "5e-5", 5e-5),
    ("learning_rate", "1", 1.0),
    ("learning_rate", np.float64(0.5), 0.5),
    ("learning_rate", torch.tensor(0.5), 0.5),
    ("learning_rate", Fraction(1, 2), 0.5),
    ("learning_rate", 1, 1),
    ("max_steps", "1e3", 1000),
    ("max_steps", 3.0, 3),
    ("max_steps", np.int64(3), 3),
    ("max_steps", torch.tensor(3), 3),
    ("save_total_limit", "3", 3),
    ("save_total_limit", "null", None),
    ("save_total_limit", 0, 0),
    ("warmup_steps", "0.1", 0.1),
    ("logging_steps", "10", 10),
    ("logging_steps", 10.0, 10),
    ("bf16", "False", False),
    ("bf16", 1, True),
    ("bf16", np.bool_(True), True),
    ("bf16", None, False),
    ("tf32", "no", False),
    ("disable_tqdm", "true", True),
    ("max_grad_norm", None, 0.0),
    ("max_grad_norm", False, 0.0),
    ("run_name", 2024, "2024"),
    ("hub_model_id", "", ""),  # scripts give it always, and push seldom
    ("optim_target_modules", ("q", r"layers\.\d+"), ["q", r"layers\.\d+"]),
    ("optim_target_modules", "[qk]_proj", "[qk]_proj"),
    ("eval_strategy", True, "steps"),
    ("optim", "sgd", "sgd"),
    ("label_names", ("labels",), ["labels"]),
    ("label_names", '["labels"]', ["labels"]),
    ("include_for_metrics", "inputs", ["inputs"]),
    ("include_num_input_tokens_seen", "true", "all"),
    ("lr_scheduler_kwargs", '{"num_cycles": "2"}', {"num_cycles": 2}),
    ("deepspeed", "", None),
    ("output_dir", Path("folder"), "folder"),
    ("trackio_static_space_id", False, False),
    ("async_save", "true", True),
]
REFUSED = [
    ("max_steps", 0.5),
    ("max_steps", float("nan")),
    ("max_steps", True),
    ("max_steps", -2),
    ("label_names", "labels"),
    ("label_names", [1.5]),
    ("bf16", "abc"),
    ("bf16", 2),
    ("use_cpu", "maybe"),
    ("learning_rate", float("nan")),
    ("learning_rate", "fast"),
    ("learning_rate", [1e-3]),
    ("learning_rate", -1.0),
    ("learning_rate", 10**5000),
    ("weight_decay", float("inf")),
    ("max_grad_norm", float("inf")),
    ("max_grad_norm", -1),
    ("adam_beta1", 1.0),
    ("adam_beta2", -0.1),
    ("save_total_limit", "x"),
    ("save_total_limit", 1.5),
    ("eval_accumulation_steps", "x"),
    ("eval_accumulation_steps", 0),
    ("dataloader_num_workers", -1),
    ("per_device_train_batch_size", "0"),
    ("seed", -1),
    ("num_train_epochs", float("inf")),
    ("eval_strategy", "Steps"),
    ("optim", "adamw"),
    ("lr_scheduler_type", None),
    ("log_level", 25),
    ("log_level", "9" * 5000),
    ("report_to", "tensor_board"),
    ("report_to", [3]),
    ("fsdp", "full_shart"),
    ("debug", "all"),
    ("include_for_metrics", ["labels"]),
    ("lr_scheduler_kwargs", "linear"),
    ("lr_scheduler_kwargs", "{'a': 1}"),
    ("lr_scheduler_kwargs", {1: 2}),
    ("gradient_checkpointing_kwargs", [1]),
    ("accelerator_config", {"split_batches": "maybe"}),
    ("accelerator_config", {"gradient_accumulation_kwargs": {"num_steps": 0}}),
    ("accelerator_config", {"gradient_accumulation_kwargs": {"steps": 2}}),
    ("accelerator_config", "no/such/file.json"),
    ("deepspeed", "no/such/file.json"),
    ("deepspeed", {"a": object()}),
    ("fsdp_config", [1]),
    ("parallelism_config", {"dp_size": 2}),
    ("output_dir", "a\0b"),
    ("output_dir", ""),
    ("output_dir", " "),
    ("run_name", ["a"]),
    ("async_save", "maybe"),
    *(("optim_target_modules", value) for value in (3, "", " ", [], ["a", 3], [""], "(", ["a", "("])),
    *((name, value) for name in ("torch_compile_backend", "torch_compile_mode") for value in (3, "", " ")),
    *((name, value) for name in ("metric_for_best_model", "length_column_name") for value in (3, "", " ")),
    ("label_names", [3]),
    ("label_names", [""]),
    ("dataloader_multiprocessing_context", ""),
]
# What is nonsense beside other arguments only: the argument that the error names, its value, the others.
REFUSED_BESIDE = [
    *(("hub_model_id", value, {"push_to_hub": True}) for value in ("", " ", "a b", "a/b/c", "/", "a/", "ü")),
    ("hub_revision", "", {"push_to_hub": True}),
    ("dataloader_multiprocessing_context", "fork", {}),
]


def make(**values):
    return TrainingArguments(**{"output_dir": "out", "use_cpu": True, **values})


def assigned(**values):
    args = make()
    for name, value in values.items():
        setattr(args, name, value)
    return args


WAYS = {
    "constructor": make,
    "assignment": assigned,
    "replace": lambda **values: dataclasses.replace(make(), **values),
    "parser": lambda **values: HfArgumentParser(TrainingArguments).parse_dict({"output_dir": "out", **values})[0],
}
FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_read(way):
    for name, given, meant in READ:
        if way == "replace" and name not in FIELDS:
            continue
        values = {name: given} if name != "bf16" or way == "parser" else {name: given, "use_cpu": True}
        read = getattr(WAYS[way](**({**values, "use_cpu": True} if way == "parser" else values)), name)
        assert (read, type(read) is bool) == (meant, type(meant) is bool), (name, given)
        assert not isinstance(read, (np.generic, torch.Tensor)), name


@pytest.mark.parametrize(("name", "value", "others"), REFUSED_BESIDE)
def test_nonsense_beside_other_arguments_is_refused_by_name(name, value, others, tmp_path):
    message = rf"`{name}={re.escape(repr(value))}` (?s:.*)Hint: "
    with pytest.raises(ArgumentError, match=message):
        make(**{name: value}, **others)
    args = make(output_dir=str(tmp_path), report_to="none")
    for changed, given in {name: value, **others}.items():
        setattr(args, changed, given)
    with pytest.raises(ArgumentError, match=message):
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_nonsense_is_refused_by_name(way, number):
    name, value = REFUSED[number]
    if way == "replace" and name not in FIELDS:
        way = "constructor"
    with pytest.raises(ArgumentError, match=f"(?s)`{name}.*Hint: ") as caught:
        WAYS[way](**{name: value})
    assert isinstance(caught.value, ValueError) and len(str(caught.value)) < 2500


def test_a_refused_assignment_changes_nothing():
    args = make(save_total_limit=3)
    with pytest.raises(ArgumentError, match="save_total_limit='x'"):
        args.save_total_limit = "x"
    with pytest.raises(ArgumentError, match=r"(?s)weight_decay=-1.*gradient_accumulation_steps=0"):
        args.set_training(learning_rate=1.0, weight_decay=-1, gradient_accumulation_steps=0)
    assert (args.save_total_limit, args.learning_rate, args.do_train) == (3, 5e-5, False)


def test_setters_read_their_values():
    args = make().set_training(learning_rate="1e-3", batch_size="4").set_save("steps", steps="7").set_logging(steps="9")
    assert (args.learning_rate, args.per_device_train_batch_size, args.save_steps, args.logging_steps) == (
        1e-3,
        4,
        7,
        9,
    )
    with pytest.raises(ArgumentError, match=r"needs `steps` above 0 \(it sets `eval_steps`\)"):
        args.set_evaluate("steps", steps="0")
    with pytest.raises(ArgumentError, match=r"(?s)eval_strategy='step'.*did you mean 'steps'"):
        args.set_evaluate("step")


def test_all_complaints_of_a_call_come_at_once():
    with pytest.raises(ArgumentError, match=r"(?s)learning_rate='x'.*seed=-1.*`fp16` and `bf16` are both on"):
        make(learning_rate="x", seed=-1, fp16=True, bf16=True)


def test_enums_name_the_choices_and_the_nearest():
    with pytest.raises(
        ArgumentError, match=r"(?s)='Epochs'.*choose one of 'no', 'steps', 'epoch'; did you mean 'epoch'"
    ):
        make(eval_strategy="Epochs")


def test_old_names_are_named_as_they_were_given():
    for name, value in (("no_cuda", "maybe"), ("warmup_ratio", 3), ("evaluation_strategy", "x"), ("adafactor", "x")):
        with pytest.raises(ArgumentError, match=f"`{name}="):
            make(**{name: value})
    assert make(warmup_ratio="0.1").warmup_steps == 0.1
    assert make(group_by_length="false").train_sampling_strategy == "random"
    assert TrainingArguments("out", no_cuda="true").use_cpu is True


def test_secrets_stay_out_of_messages():
    for value in ("hf_secret\0", ["hf_secret"], {"a": "hf_secret"}):
        with pytest.raises(ArgumentError, match="<HUB_TOKEN>") as caught:
            make(hub_token=value)
        assert "hf_secret" not in str(caught.value)


def test_subclasses_keep_their_own_types():
    @dataclasses.dataclass
    class Own(TrainingArguments):
        temperature: float = 0.9
        layers: int = None
        tags: str = "a,b"
        bf16: bool | None = None
        learning_rate: float = 1e-6
        report_to: str = "none"

        def __post_init__(self):
            self.tags = self.tags.split(",")
            self.was_given = self.bf16 is not None
            super().__post_init__()

    args = Own("out", temperature="0.5", layers="3", learning_rate="1e-4", use_cpu=True)
    assert (args.temperature, args.layers, args.tags, args.learning_rate) == (0.5, 3, ["a", "b"], 1e-4)
    assert args.was_given is False and args.report_to == []
    args.temperature = [1, 2]  # the subclass's affair
    for values, name in (({"temperature": "hot"}, "temperature"), ({"max_steps": 0.5}, "max_steps")):
        with pytest.raises(ArgumentError, match=f"`{name}="):
            Own("out", **values)
    with pytest.raises(ArgumentError, match="`learning_rate="):
        Own("out").learning_rate = "fast"


def test_a_subclass_with_a_constructor_of_its_own():
    class Own(TrainingArguments):
        def __init__(self, folder, **rest):
            self.mine = rest.pop("mine", 1)
            super().__init__(output_dir=folder, use_cpu=True, **rest)

    args = Own("out", mine=2, seed="3")
    assert (args.output_dir, args.mine, args.seed) == ("out", 2, 3)
    with pytest.raises(ArgumentError, match="`seed='x'`"):
        Own("out", seed="x")


def test_arguments_of_transformers_are_read(tmp_path):
    import transformers

    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    theirs.save_total_limit, theirs.learning_rate = "3", "1e-3"
    args = Trainer(toy.Classifier(), theirs, train_dataset=toy.rows(8)).args
    assert (args.save_total_limit, args.learning_rate) == (3, 1e-3)
    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    theirs.eval_accumulation_steps = "x"
    with pytest.raises(ArgumentError, match="eval_accumulation_steps='x'"):
        Trainer(toy.Classifier(), theirs, train_dataset=toy.rows(8))
    with pytest.raises(ArgumentError, match="eval_accumulation_steps='x'"):
        explain(theirs)


def test_arguments_stay_plain_objects():
    args = make(learning_rate="1e-3", report_to="none", eval_strategy="steps")
    assert copy.copy(args) == copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == args
    assert dataclasses.replace(args) == args
    assert set(vars(args)) - FIELDS <= {"mixed_precision", "device", "_launch", "distributed_state"}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"lr_scheduler_kwargs": {"num_cycle": 2}}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "x"}}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": [1]}}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs"),
        ({"optim_args": "momentum"}, "optim_args"),
        ({"optim": "sgd", "optim_args": "momentum=x"}, "optim_args"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "optim_args"),
        ({"optim": "sgd", "optim_args": "nesterov=maybe,momentum=0.9"}, "optim_args"),
        ({"optim": "adamw_torch", "optim_args": "betas=1"}, "optim_args"),
    ],
)
def test_options_that_are_of_no_use_are_told_before_training(make_args, values, name):
    with pytest.raises(ArgumentError, match=name):
        Trainer(toy.Classifier(), make_args(**values), train_dataset=toy.rows(8))
    assert name in explain(make_args(**values)).refused


def test_an_override_takes_options_of_its_own(make_args):
    class Own(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, **self.args.lr_scheduler_kwargs)
            return self.lr_scheduler

    args = make_args(lr_scheduler_kwargs={"factor": 0.5, "total_iters": 2}, max_steps=2)
    assert Own(toy.Classifier(), args, train_dataset=toy.rows(8)).train().global_step == 2


def test_what_a_later_assignment_breaks_is_told_before_training(make_args):
    args = make_args()
    args.logging_steps = 0
    with pytest.raises(ArgumentError, match="logging_steps"):
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))
    args = make_args()
    args.eval_strategy = "steps"  # upstream: 500, the state's own
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(8))
    assert trainer.train().global_step == 4 and trainer.state.eval_steps == 500


def test_classes_in_place_of_objects(make_args):
    import transformers

    with pytest.raises(UnsupportedArgument, match="accelerator_config") as caught:
        make_args(accelerator_config=transformers.trainer_pt_utils.AcceleratorConfig)
    assert isinstance(caught.value, NotImplementedError)


def test_options_of_activation_checkpointing_are_told_before_training(make_args):
    for options in ({"reentrant": False}, {"use_reentrant": "maybe"}):
        args = make_args(gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
        with pytest.raises(ArgumentError, match="gradient_checkpointing_kwargs"):
            Trainer(toy.tiny_gpt2(), args, train_dataset=toy.blocks(8))


def test_inputs_for_metrics_that_no_batch_has(make_args):
    trainer = Trainer(toy.Classifier(), make_args(include_for_metrics=["inputs"]), eval_dataset=toy.rows(8))
    trainer.compute_metrics = lambda prediction: {}
    with pytest.raises(ArgumentError, match=r"include_for_metrics=\['inputs'\]` keeps the input 'input_ids'"):
        trainer.evaluate()


def test_numbers_of_torch_that_would_not_mix(make_args):
    trainer = Trainer(toy.Classifier(), make_args(adam_beta1=0, max_steps=1), train_dataset=toy.rows(8))
    assert trainer.train().global_step == 1


def test_variables_of_a_launcher_that_are_no_numbers(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv(name, "first")
        with pytest.raises(ArgumentError, match=f"{name}='first'"):
            explain(make())


def test_files_that_never_end_are_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        for name in ("deepspeed", "fsdp_config", "accelerator_config"):
            with pytest.raises(ArgumentError, match=f"(?s)`{name}.*not a regular file"):
                make(**{name: path})


def test_a_native_module_reads_arguments_as_a_trainer_does(tmp_path):
    import transformers

    from hf_compat import HFModule

    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    theirs.learning_rate = "1e-3"
    assert HFModule(toy.Classifier(), theirs).steps.args.learning_rate == 1e-3
    with pytest.raises(ArgumentError, match="lr_scheduler_kwargs"):
        HFModule(toy.Classifier(), make(lr_scheduler_kwargs={"power": 2}))


@pytest.mark.parametrize("level", ["error", "warning", "info"])
def test_bars_follow_the_verbosity_of_transformers(tmp_path, level):
    before = transformers.logging.get_verbosity()
    getattr(transformers.logging, f"set_verbosity_{level}")()
    try:
        ours, theirs = (
            kind(str(tmp_path), use_cpu=True) for kind in (TrainingArguments, transformers.TrainingArguments)
        )
    finally:
        transformers.logging.set_verbosity(before)
    assert ours.disable_tqdm == theirs.disable_tqdm == (level == "error")
    ours.disable_tqdm = False
    assert ours.disable_tqdm is False


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fp16_full_eval": True, "bf16_full_eval": True}, "`fp16_full_eval` and `bf16_full_eval` are both on"),
        ({"fp16": True, "bf16": True}, "`fp16` and `bf16` are both on"),
        ({"bf16": True, "use_cpu": False}, "`bf16` on the CPU has to be asked for"),
        ({"bf16_full_eval": True, "use_cpu": False}, "`bf16_full_eval` on the CPU has to be asked for"),
        ({"fp16": True, "fsdp": "full_shard"}, "`fp16=True` with `fsdp` or `deepspeed` requires a GPU"),
        ({"tf32": True}, "`tf32=True` requires an Ampere"),
        ({"push_to_hub": True, "hub_model_id": "a/b/c"}, "`hub_model_id='a/b/c'` names no repository"),
        ({"push_to_hub": True, "hub_revision": " "}, "`hub_revision=' '` names no branch"),
        ({"logging_strategy": "steps", "logging_steps": 0}, "needs `logging_steps` above 0, got 0"),
        ({"save_strategy": "steps", "save_steps": 0}, None),
        ({"save_strategy": "steps", "save_steps": 1.5}, "`save_steps=1.5` must be an integer if bigger than 1"),
        ({"save_strategy": "steps", "save_steps": 1.0}, None),
        ({"save_strategy": "steps", "save_steps": -1}, "save_steps"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "requires an eval strategy"),
    ],
)
def test_values_that_contradict_each_other(tmp_path, values, said):
    found = None
    try:
        TrainingArguments(str(tmp_path), **{"use_cpu": True, **values})
    except ArgumentError as error:
        found = str(error)
    assert (found is None) == (said is None) and (said or "") in (found or "")


@pytest.mark.parametrize(("content", "said"), [
    ("[1]", "the file holds no JSON object"), ("{", "not a readable JSON file"),
    ("{}" + " " * 9_999_999, "has more than 10000000"),
])  # fmt: skip
def test_a_file_of_options_that_is_refused(tmp_path, content, said):
    (tmp_path / "options.json").write_text(content)
    with pytest.raises(ArgumentError, match=said):
        TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config=str(tmp_path / "options.json"))
    (tmp_path / "options.json").write_text('{"split_batches": true}' + " " * (10_000_000 - 23))
    path = str(tmp_path / "options.json")
    assert TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config=path).accelerator_config.split_batches
    assert AcceleratorConfig.from_json_file(path).split_batches


def test_options_are_nested_as_deeply_as_anyone_needs(tmp_path):
    def nested(depth, inner):
        return {"a": nested(depth - 1, inner)} if depth else inner

    for inner in ({}, {"a": [1]}):
        TrainingArguments(str(tmp_path), use_cpu=True, lr_scheduler_kwargs=nested(50 - bool(inner), inner))
    for inner in ({}, {"a": [[1]]}, {"a": [{}]}):
        with pytest.raises(ArgumentError, match="nested too deeply"):
            TrainingArguments(str(tmp_path), use_cpu=True, lr_scheduler_kwargs=nested(51 - bool(inner), inner))


def test_an_argument_of_ours_is_checked_by_its_annotation_and_row(monkeypatch):
    """A row without `kind` is enough, as it is for an argument of transformers."""
    row = Row("somewhere", "nothing", subject="logs", allowed=argument_values.NOT_NEGATIVE)
    monkeypatch.setitem(OWN_ARGUMENTS, "alarm", OwnArgument(None, "A number.", row))
    monkeypatch.setitem(TrainingFields.__annotations__, "alarm", "ClassVar[float | None]")
    check = argument_values.checks_of.__wrapped__(TrainingArguments, TrainingArguments)["alarm"]
    assert check.read("2.5") == 2.5 and check.read(None) is None
    for wrong in (-1.0, "high"):
        with pytest.raises(ArgumentError, match="alarm"):
            check.read(wrong)


def test_a_row_that_says_no_more_has_an_effect_everywhere_and_takes_no_none():
    assert dataclasses.asdict(Row("somewhere", "nothing")) == {
        "to": "somewhere", "ejected": "nothing", "says": "the project has no word for it", "subject": None,
        "kind": None, "allowed": None, "takes_none": False, "none_means": None, "way_out": "", "form": None,
        "native": None, "data": False, "loader": "", "of_trainer": False, "reaches_out": False, "normal": None,
        "derived": None, "inert": (), "per_rank": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("declared", "default", "given", "outcome"),
    [
        # again, with the type of before: read as before, with the new default
        ("learning_rate: float", 0.5, "0.25", 0.25),
        ("learning_rate: float", 0.5, None, ArgumentError),
        ("learning_rate: float", 0.5, "fast", ArgumentError),
        ("learning_rate: int", 1, "2", 2.0),
        # with None allowed
        ("learning_rate: 'float | None'", 0.5, None, None),
        ("learning_rate: float", None, None, None),
        ("learning_rate: 'float | None'", None, "0.25", 0.25),
        # wider than before: kept as it is where it is no number
        ("learning_rate: 'float | str'", 0.5, "fast", "fast"),
        ("learning_rate: str", "fast", "slow", "slow"),
        ("max_steps: float", 2.0, 2.5, 2.5),
        # anew
        ("own: float", 0.5, 0.25, 0.25),
        ("own: str", "a", "b", "b"),
        ("own: 'int | None'", None, None, None),
        ("own: 'Unknown'", 1, "text", "text"),
    ],
)
def test_a_field_of_a_subclass_is_read_by_its_hint(declared, default, given, outcome, tmp_path):
    name, hint = declared.split(": ")
    hints = {"float": float, "int": int, "str": str}
    field = (name, hints.get(hint, hint.strip("'")), dataclasses.field(default=default))
    place = {"__module__": __name__}
    kind = dataclasses.make_dataclass("Own", [field], bases=(TrainingArguments,), namespace=place)
    assert getattr(kind(str(tmp_path), use_cpu=True), name) == default
    if outcome is ArgumentError:
        with pytest.raises(ArgumentError, match=name):
            kind(str(tmp_path), use_cpu=True, **{name: given})
    else:
        found = getattr(kind(str(tmp_path), use_cpu=True, **{name: given}), name)
        assert found == outcome and type(found) is type(outcome)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        *((word, True) for word in ("true", "1", "yes", "on", "True ", True)),
        *((word, False) for word in ("false", "0", "no", "off", "FALSE", False)),
        ("full_shard", "full_shard"),
        ("full_shard offload", "full_shard offload"),
        (["full_shard", "auto_wrap"], ["full_shard", "auto_wrap"]),
        ("", ""),
        ("half_shard", None),
        ("2", None),
        (["half_shard"], None),
    ],
)
def test_fsdp_is_a_truth_value_or_words_of_4_x(word, found):
    if found is None:
        with pytest.raises(argument_values.Unreadable):
            argument_values.fsdp.read(word)
    else:
        got = argument_values.fsdp.read(word)
        assert got == found and type(got) is type(found)


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        ("INTERVALS", True, "steps"), ("INTERVALS", False, "no"), ("INTERVALS", "epoch", "epoch"),
        ("SAVES", True, "steps"), ("SAVES", False, "no"), ("SAVES", "best", "best"),
        ("tokens_seen", True, "all"), ("tokens_seen", "False", "no"), ("tokens_seen", "non_padding", "non_padding"),
        ("debug", True, "tpu_metrics_debug"), ("debug", False, ""), ("debug", "false", ""), ("debug", "", ""),
        ("debug", ("underflow_overflow",), ["underflow_overflow"]), ("debug", [], []),
        ("debug", "underflow_overflow tpu_metrics_debug", "underflow_overflow tpu_metrics_debug"),
        ("trackers", "all", "all"), ("trackers", ("wandb",), ["wandb"]), ("trackers", ["none"], ["none"]),
        ("checkpoint", True, True), ("checkpoint", False, False), ("checkpoint", "", ""), ("checkpoint", "a", "a"),
        ("LOG_LEVEL", "info", "info"), ("LOG_LEVEL", 20, "info"), ("LOG_LEVEL", "20", "info"),
        ("LOG_LEVEL", -1, "passive"), ("LOG_LEVEL", "-1", "passive"), ("LOG_LEVEL_REPLICA", -1, "warning"),
        ("LOG_LEVEL", 10, "debug"), ("LOG_LEVEL", "passive", "passive"), ("LOG_LEVEL", "detail", "detail"),
        ("metric_inputs", "loss", ["loss"]), ("metric_inputs", '["inputs"]', ["inputs"]), ("metric_inputs", [], []),
    ],
)  # fmt: skip
def test_a_value_is_read_by_its_kind(kind, value, found):
    got = getattr(argument_values, kind).read(value)
    assert got == found and isinstance(got, type(found))


@pytest.mark.parametrize(
    ("kind", "value", "part"),
    [
        ("INTERVALS", "best", None), ("SAVES", "worst", None), ("tokens_seen", "some", None), ("tokens_seen", 1, None),
        ("debug", "underflow_overflow x", "x"), ("debug", ["x"], "x"), ("debug", 3, 3), ("fsdp", ["x"], "x"),
        ("fsdp", "offload x", "x"), ("trackers", "x", "x"), ("trackers", ["wandb", "all"], "all"),
        ("trackers", ["wandb", "none"], "none"), ("trackers", 3, 3), ("LOG_LEVEL", 21, None),
        ("LOG_LEVEL", True, None), ("LOG_LEVEL", "1234567890", None), ("metric_inputs", ["x"], "x"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_read_names_its_part(kind, value, part):
    with pytest.raises(argument_values.Unreadable) as caught:
        getattr(argument_values, kind).read(value)
    assert caught.value.part == part


@pytest.mark.parametrize("is_class", [True, False])
@pytest.mark.parametrize("logs", [True, False])
def test_a_tracker_is_an_object_that_logs(is_class, logs):
    kind = type("Logger", (), {"log_metrics": (lambda self: None) if logs else "no method"})
    value = kind if is_class else kind()
    with pytest.raises(argument_values.Unreadable) if is_class or not logs else contextlib.nullcontext():
        assert argument_values.trackers.read(value) == [value]
