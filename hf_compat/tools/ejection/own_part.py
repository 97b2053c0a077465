"""The script's subclass of HF's Trainer. Its methods are taken over on a stand-in, `hf_trainer.py` of the project."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_compat.runtime.inspection import accepts_keyword, home_of
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.sources import Definition
from hf_compat.tools.until_train import overrides_of
from hf_compat.trainer import Trainer

# Overrides that the project calls, and Lightning's counterparts for those that cannot be taken over.
_SEAMS = {
    "_prepare_inputs": "`on_after_batch_transfer` of a LightningModule",
    "_save": "`after_fit` in `main.py`, and `on_save_checkpoint` of a LightningModule",
    "compute_loss": "`training_step` and `validation_step` in `module.py`",
    "evaluate": "`on_validation_epoch_end` in `module.py`, `val_dataloader` in `data.py`",
    "log": "`write_log` in `module.py`",
    "prediction_step": "`validation_step` in `module.py`",
    "save_model": "`after_fit` in `main.py`, and `on_save_checkpoint` of a LightningModule",
    "training_step": "`training_step` in `module.py`, with `self.manual_backward(loss)`",
}
# Overrides whose results are read off the run.
_READ_OFF = frozenset(
    (
        "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler", "get_decay_parameter_names",
        "get_optimizer_cls_and_kwargs", "get_train_dataloader", "get_eval_dataloader", "get_num_trainable_parameters",
        "get_learning_rates", "get_optimizer_group", "num_examples", "num_tokens", "_get_train_sampler",
        "_get_eval_sampler", "_set_signature_columns_if_needed", "_remove_unused_columns",
        "_get_collator_with_removed_columns",
    )
)  # fmt: skip
# Overrides that change no number of a fit.
_BESIDE = {
    "_save": _SEAMS["_save"],
    "save_model": _SEAMS["save_model"],
    "train": "`on_fit_start` and `on_fit_end` of a LightningModule",
    "predict": "`predict_step` of a LightningModule",
    "get_test_dataloader": "`test_dataloader` of a LightningDataModule",
    "_save_checkpoint": "`on_save_checkpoint` of a LightningModule",
    "_rotate_checkpoints": "`save_top_k` of a ModelCheckpoint",
    "_sorted_checkpoints": "`save_top_k` of a ModelCheckpoint",
    "_load_from_checkpoint": "`on_load_checkpoint` of a LightningModule",
    "_load_optimizer_and_scheduler": "`on_load_checkpoint` of a LightningModule",
    "_save_optimizer_and_scheduler": "`on_save_checkpoint` of a LightningModule",
    **dict.fromkeys(
        ("push_to_hub", "create_model_card", "init_hf_repo", "_push_from_checkpoint", "_finish_current_push"),
        "`self.model.push_to_hub(…)` in `after_fit` in `main.py`",
    ),
    **dict.fromkeys(("floating_point_ops", "store_flos"), "`lightning.fabric.utilities.throughput`"),
    **dict.fromkeys(("log_metrics", "save_metrics", "save_state", "metrics_format"), "a logger of Lightning's"),
    **dict.fromkeys(("hyperparameter_search", "_hp_search_setup", "call_model_init"), "one run at a time"),
}  # fmt: skip
_ELSEWHERE = "the hooks of a LightningModule, in `module.py`"
_STAND_IN = Path(__file__).parent / "templates" / "hf_trainer.py.jinja"


@dataclass
class OwnPart:
    """The parts of the script's Trainer that the project needs."""

    own: str | None = None
    seams: set[str] = field(default_factory=set)
    supers: set[str] = field(default_factory=set)  # methods that its own methods call by `super()`
    internal_call: str = ""  # the argument that HF's Trainer passes to `save_model`, if the script's takes it
    left: list[str] = field(default_factory=list)  # comments for other overrides, errors if numbers depend on them


def describe_own(trainer: Trainer, write: Expressions, user: Expressions, findings: Findings) -> OwnPart:
    """Take over the overrides of the Trainer's class, with all that they read."""
    part = OwnPart()
    reach = _Reach(
        trainer, [kind for kind in type(trainer).__mro__ if write.recorder.is_of_script(kind.__module__)], user
    )
    stubs: dict[str, list[str]] = {}
    for name, owner, value in overrides_of(trainer):
        if name in _READ_OFF:
            continue
        where = f"`{owner}.{name}` ({user.code.where(value)})"
        try:
            if name not in _SEAMS:
                raise CannotBeWritten("the project has no call of it")
            reach.take(name)
            part.seams.add(name)
            if name == "save_model" and accepts_keyword(getattr(trainer, name), "_internal_call"):
                part.internal_call = ", _internal_call=True"
        except CannotBeWritten as error:
            what = f"{where} is not taken over: {error}"
            if name in _BESIDE:
                part.left += findings.mark(what, _BESIDE[name])
            elif name in _SEAMS and reach.kinds:
                stubs[name] = findings.leave(what, _SEAMS[name])
                part.seams.add(name)
            else:
                part.left += findings.leave(what, _SEAMS.get(name, _ELSEWHERE))
    part.supers = reach.supers
    if part.seams:
        left = [f"def {name}(self, *args, **kwargs):\n    " + "\n    ".join(lines) for name, lines in stubs.items()]
        constants = [f"self.{name} = {text}" for name, text in sorted(reach.constants.items())]
        methods = reach.methods - stubs.keys()
        try:
            part.own = write.of_user_code(user.code.add_trainer(reach.kinds, methods, constants, left))
        except CannotBeWritten as error:
            what = f"The methods of {reach.kinds[0].__name__} ({user.code.where(reach.kinds[0])}) are not taken over"
            part.left += findings.leave(f"{what}: {error}", _ELSEWHERE)
            part.seams, part.supers = set(), set()
    return part


class _Reach:
    """Collects the methods that some methods reach, and the attributes with their values."""

    def __init__(self, trainer: Trainer, kinds: list[type], user: Expressions) -> None:
        self.trainer, self.kinds, self.user = trainer, kinds, user
        self.methods, self.supers = set[str](), set[str]()
        self.constants: dict[str, str] = {}
        homes = ("transformers.", "hf_compat.", "builtins", "typing", "abc")
        self._libraries = [k for k in type(trainer).__mro__ if k not in kinds and not home_of(k).startswith(homes)]
        stand_in = _STAND_IN.read_text(encoding="utf-8")
        self._stand_in = frozenset(re.findall(r"^    (?:    self\.|def )(\w+)", stand_in, re.M))

    def take(self, first: str) -> None:
        """Take over a method with all that it reaches."""
        methods, supers, constants, waiting = set[str](), set[str](), dict[str, str](), [first]
        model, known = self.trainer.model, self.user.known
        known.update({id(part): f"self.model.get_submodule({name!r})" for name, part in model.named_modules()})
        known.update({id(part): f"self.model.get_parameter({name!r})" for name, part in model.named_parameters()})
        known.update({id(model): "self.model", id(self.trainer): "self"})
        try:
            while waiting:
                name = waiting.pop()
                if name in methods:
                    continue
                methods.add(name)
                for read, by_super in self._read_in(name):
                    supers |= {read} if by_super else set()
                    found = next((vars(kind)[read] for kind in self.kinds if read in vars(kind)), None)
                    is_code = inspect.isroutine(found) or isinstance(found, (property, staticmethod, classmethod))
                    if is_code and read not in vars(self.trainer):
                        waiting.append(read)
                    elif by_super and read not in self._stand_in:
                        raise CannotBeWritten(f"`{name}` calls `super().{read}` of HF's Trainer")
                    elif read not in self._stand_in and hasattr(self.trainer, read):
                        value = getattr(self.trainer, read)
                        is_ours = home_of(type(value)).startswith("hf_compat.")
                        if is_ours or callable(getattr(Trainer, read, None)):
                            raise CannotBeWritten(f"`{name}` reads `self.{read}` of HF's Trainer")
                        constants[read] = self.user.under(read, value)
            for kind in self.kinds:
                self.user.code.add_needs_of(kind, methods)
        finally:
            known.clear()
        self.methods |= methods
        self.supers |= supers
        self.constants |= constants

    def _read_in(self, name: str) -> Iterator[tuple[str, bool]]:
        """Yield the attributes of `self` that a method of any class reads, and whether by `super()`."""
        for kind in self._libraries:
            if name in vars(kind):
                raise CannotBeWritten(
                    f"`{name}` is that of {kind.__module__}.{kind.__name__}, not a class of the script"
                )
        if name in vars(self.trainer):
            raise CannotBeWritten(f"`{name}` was put on the Trainer object, and is in no class of the script")
        if not any(name in vars(kind) for kind in self.kinds):
            raise CannotBeWritten(f"`{name}` was put on HF's Trainer, and is in no class of the script")
        for kind in self.kinds:
            if name not in vars(kind):
                continue
            body = self.user.code.node_of(kind).body
            found = [part for part in body if isinstance(part, Definition) and part.name == name]
            if not found:
                raise CannotBeWritten(f"`{name}` was put on {kind.__name__}, and is not defined in it")
            for definition in found:
                yield from _reads(definition)


def _reads(definition: Definition) -> Iterator[tuple[str, bool]]:
    """Yield the attributes of `self` that a method reads, and whether by `super()`."""
    places = [] if isinstance(definition, ast.ClassDef) else definition.args.args
    own = places[0].arg if places else "self"
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own:
            yield node.attr, False
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and called.id == "super":
                yield node.attr, True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            named = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
            if isinstance(node.args[0], ast.Name) and node.args[0].id == own and named:
                yield str(named[0]), False
