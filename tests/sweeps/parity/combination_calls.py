"""The call sequences that `combinations.py` draws from: what a script does with its Trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from helpers import toy
from helpers.toy import EVENTS, FLAGS
from sweeps.parity.combination_features import PLAIN, Feature, own_callback, trainer_class

BASE = {
    "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 2,
    "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none",
}  # fmt: skip
# Durations, rates over them and memory are the machine's.
TIMED = ("_runtime", "_per_second", "_preparation_time", "_delta", "_before_init_mem_cpu", "_mem_cpu")
OWN_LOGS = ("nonfinite_steps",)  # a row of docs/differences.md


class Interruption(Exception):
    """What a script's own code raises in the middle of a run."""


class Ended(Exception):
    """A call has failed: the rest of the sequence is left out."""


def plain(value: object) -> object:
    """Return a result without times, of plain types."""
    if isinstance(value, dict):
        kept = {k: plain(v) for k, v in value.items() if not str(k).endswith(TIMED) and k not in OWN_LOGS}
        timed = sorted(str(k) for k in value if str(k).endswith(TIMED))
        return kept | ({"timed": timed} if timed else {})
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@dataclass
class Session:
    """One row under one api: it makes Trainers and keeps what their calls gave.

    Args:
        api: `transformers` or `hf_compat`.
        chosen: The row's features.
        folder: The output folder of all its Trainers.
        is_theirs: It is transformers' side.
        interrupts: Interruptions happen; without, the same sequence runs to its end at once.
    """

    api: object
    chosen: list[Feature]
    folder: Path
    is_theirs: bool
    interrupts: bool = True
    args: dict = field(default_factory=dict)
    trace: list = field(default_factory=list)
    found: list = field(default_factory=list)
    said: list = field(default_factory=list)
    trainer: object = None
    begun: int = 0

    def make(self, *more, **changes):
        """Make the script's Trainer, as a new process would."""
        self.api.set_seed(1)
        task = next(one.task for one in self.chosen if one.task)
        model = task["model"]()
        keywords: dict = {"model": model, "train_dataset": task["train"](), "eval_dataset": task["eval"]()}
        callbacks = [self._tracer()(), *(own_callback(self.api, one) for one in self.chosen if one.callback)]
        for one in self.chosen:
            extra = one.extra(self.api, model) if one.extra else {}
            callbacks += extra.pop("callbacks", [])
            keywords |= extra
        chosen = self._arguments() | self.args | changes
        args = self.api.TrainingArguments(output_dir=str(self.folder), **chosen)
        kind = trainer_class(self.api, self.chosen, self.is_theirs)
        self.trainer = trainer = kind(args=args, callbacks=[*callbacks, *more], **keywords)
        trainer.found = self.found
        for callback in trainer.callback_handler.callbacks:
            callback.trainer = trainer
        self.trace.append("a new Trainer")
        return trainer

    def _arguments(self) -> dict:
        found = dict(BASE)
        for one in self.chosen:
            found |= one.args | ({} if self.is_theirs else one.ours)
        return found

    def _tracer(self):
        def record(event):
            def method(_, args, state, control, **kwargs):
                flags = tuple(bool(getattr(control, name)) for name in FLAGS)
                shown = tuple(sorted(name for name in kwargs if name != "tokenizer"))
                self.trace.append((event, state.global_step, state.epoch, flags, shown))

            return method

        return type("Tracer", (self.api.TrainerCallback,), {event: record(event) for event in EVENTS})

    def interrupting(self, event: str, step: int, error: type[BaseException] = Interruption, skipped: int = 0):
        """Return a callback that raises at an event, once."""
        session, left = self, [skipped]

        def method(self, args, state, control, **kwargs):
            if session.interrupts and state.global_step >= step and left[0] >= 0:
                left[0] -= 1
                if left[0] < 0:
                    raise error("now")

        return type("Interrupting", (self.api.TrainerCallback,), {event: method})()

    def do(self, name: str, act: Callable[[], object]) -> object:
        """Make a call, and keep what it gives or raises."""
        self.begun = len(self.trace)
        try:
            value = act()
        except (Exception, KeyboardInterrupt) as error:
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException)]
            self.said.append((name, "raises", kinds, str(error)))
            if not isinstance(error, (Interruption, KeyboardInterrupt)):
                raise Ended from error
            return None
        self.said.append((name, "gives", plain(_shown(value)), ""))
        return value

    def train(self, name: str = "train", **keywords) -> object:
        return self.do(name, lambda: self.trainer.train(**keywords))

    def newest(self) -> str | bool:
        """Return the newest checkpoint's folder."""
        found = [p for p in self.folder.glob("checkpoint-*") if p.is_dir()]
        return str(max(found, key=lambda p: int(p.name.split("-")[1]))) if found else True

    def oldest(self) -> str | bool:
        found = [p for p in self.folder.glob("checkpoint-*") if p.is_dir()]
        return str(min(found, key=lambda p: int(p.name.split("-")[1]))) if found else True


def _shown(value: object) -> object:
    if type(value).__name__ == "TrainOutput":
        return [value.global_step, value.training_loss, value.metrics]
    return value


@dataclass(frozen=True, kw_only=True)
class Calls:
    """A call sequence.

    Args:
        name: What `--features` calls it.
        run: What it does with a session.
        family: Sequences of one family are drawn as often as one.
        resumes: The run that it resumes has to be the uninterrupted one.
        saves: It needs checkpoints.
        tasks: The tasks that it fits.
    """

    name: str
    run: Callable[[Session], None]
    family: str
    resumes: bool = False
    saves: bool = False
    tasks: tuple[str, ...] = ()


CALLS: dict[str, Calls] = {}


def calls(name: str, run, family: str = "", **parts) -> None:
    assert name not in CALLS, name
    CALLS[name] = Calls(name=name, run=run, family=family or name, **parts)


# One process ---------------------------------------------------------------------------------------------------------
def _train(s: Session):
    s.make()
    s.train()


def _twice(s: Session):
    s.make()
    s.train()
    s.train("again")


def _between(name: str, act, **parts):
    def run(s: Session):
        trainer = s.make()
        s.train()
        s.do(name, lambda: act(s, trainer))
        s.train("again")

    calls(f"then_{name}_then_train", run, "between", **parts)


def _first(name: str, act, **parts):
    def run(s: Session):
        trainer = s.make()
        s.do(name, lambda: act(s, trainer))
        s.train()
        s.do(f"{name} again", lambda: act(s, trainer))

    calls(f"{name}_around", run, "around", **parts)


def _more_epochs(s, trainer):
    trainer.args.num_train_epochs = 3


def _other_batch(s, trainer):
    trainer.args.per_device_train_batch_size = 3


def _other_accumulation(s, trainer):
    trainer.args.gradient_accumulation_steps = 2


def _other_rate(s, trainer):
    trainer.args.learning_rate = 0.05


def _other_data(s, trainer):
    trainer.train_dataset = toy.rows(17, 8)


def _no_optimizer(s, trainer):
    trainer.optimizer = trainer.lr_scheduler = None


def _own_optimizer(s, trainer):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)


def _other_model(s, trainer):
    trainer.model = trainer.model_wrapped = type(trainer.model)()


def _fewer_callbacks(s, trainer):
    trainer.remove_callback(
        next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "PrinterCallback")
    )


def _frozen(s, trainer):
    next(trainer.model.parameters()).requires_grad = False


def _save(s, trainer):
    trainer.save_model()
    trainer.save_state()


def _save_elsewhere(s, trainer):
    trainer.save_model(f"{s.folder}/elsewhere")


def _load(s, trainer):
    from safetensors.torch import load_file

    trainer.save_model(f"{s.folder}/elsewhere")
    trainer.model.load_state_dict(load_file(f"{s.folder}/elsewhere/model.safetensors"))


def _evaluate(s, trainer):
    return trainer.evaluate()


def _evaluate_named(s, trainer):
    return trainer.evaluate(toy.rows(9, 11), metric_key_prefix="test")


def _predict(s, trainer):
    data = trainer.eval_dataset
    output = trainer.predict(next(iter(data.values())) if isinstance(data, dict) else data)
    return [output.predictions, output.label_ids, output.metrics]


def _stateful(s, trainer):
    trainer.log_metrics("train", {"train_loss": 1.0})
    trainer.save_metrics("all", {"train_loss": 1.0})


def _output_dir(s, trainer):
    trainer.args.output_dir = str(s.folder / "second")


def _more_steps(s, trainer):
    trainer.args.max_steps = 9


def _train_loader(s, trainer):
    batch = next(iter(trainer.get_train_dataloader()))
    return sorted(batch)


def _optimizer_first(s, trainer):
    trainer.create_optimizer_and_scheduler(10)


def _scheduler_first(s, trainer):
    trainer.create_optimizer()


def _eval_loader(s, trainer):
    return sum(1 for _ in trainer.get_eval_dataloader())


calls("train", _train)
calls("train_twice", _twice, "twice")
for act in (_more_epochs, _other_batch, _other_accumulation, _other_rate, _no_optimizer, _own_optimizer, _frozen, _save,
            _evaluate, _predict, _output_dir, _more_steps, _fewer_callbacks, _save_elsewhere):  # fmt: skip
    _between(act.__name__.strip("_"), act)
_between("other_data", _other_data, tasks=PLAIN)
_between("other_model", _other_model, tasks=("rows", "rows_few", "rows_normed", "regression"))
for act in (_evaluate, _predict, _save, _train_loader, _eval_loader, _stateful, _optimizer_first, _scheduler_first):
    _first(act.__name__.strip("_"), act)
_first("evaluate_named", _evaluate_named, tasks=PLAIN)
_first("load", _load, tasks=("rows", "rows_normed", "regression", "bert"))


# Stopped and resumed -------------------------------------------------------------------------------------------------
def _killed(event: str, step: int, wanted: str, same: bool = False, skipped: int = 0, error=Interruption):
    def run(s: Session):
        s.make(s.interrupting(event, step, error, skipped))
        s.train()
        if s.interrupts:
            if not same:
                s.make()
            s.train("resumed", resume_from_checkpoint=True if wanted == "newest" else getattr(s, wanted)())

    return run


for event, step in (("on_step_end", 5), ("on_step_end", 8), ("on_step_end", 13), ("on_epoch_end", 0), ("on_save", 4),
                    ("on_log", 6), ("on_evaluate", 4), ("on_step_begin", 7), ("on_epoch_begin", 3),
                    ("on_substep_end", 4), ("on_train_end", 0), ("on_pre_optimizer_step", 6)):  # fmt: skip
    calls(f"killed_{event}_{step}", _killed(event, step, "newest"), "killed", resumes=True, saves=True)
calls("killed_resumed_by_name", _killed("on_step_end", 9, "newest"), "killed_by_name", resumes=True, saves=True)
calls("killed_oldest", _killed("on_step_end", 11, "oldest"), "killed_by_name", resumes=True, saves=True)
calls("interrupted_same", _killed("on_step_end", 6, "newest", same=True, error=KeyboardInterrupt), "same", saves=True)
calls("interrupted_same_substep", _killed("on_substep_end", 6, "newest", same=True), "same", saves=True)
calls("raised_same_evaluate", _killed("on_prediction_step", 4, "newest", same=True, skipped=1), "same", saves=True)


def _killed_then_anew(s: Session):
    """An error in the middle of a run, and then a training from the beginning with the same Trainer."""
    s.make(s.interrupting("on_step_end", 5))
    s.train()
    s.train("anew")


def _killed_in_evaluation_then_anew(s: Session):
    s.make(s.interrupting("on_prediction_step", 3, skipped=1))
    s.train()
    s.do("evaluates", s.trainer.evaluate)
    s.train("anew")


def _killed_in_update_then_anew(s: Session):
    s.make(s.interrupting("on_pre_optimizer_step", 5, KeyboardInterrupt))
    s.train()
    s.train("anew")


def _resumed(first: dict, second: dict, wanted="newest", same=False):
    def run(s: Session):
        s.make(**first)
        s.train()
        if not same:
            s.make(**second)
        s.train("resumed", resume_from_checkpoint=True if wanted == "newest" else getattr(s, wanted)())

    return run


def _stopped_at(steps: int):
    def run(s: Session):
        s.make(**({"max_steps": steps} if s.interrupts else {}))
        s.train()
        if s.interrupts:
            s.make()
            s.train("resumed", resume_from_checkpoint=True)

    return run


def _resumed_twice(s: Session):
    s.make(s.interrupting("on_step_end", 5))
    s.train()
    if s.interrupts:
        s.make(s.interrupting("on_step_end", 10))
        if s.train("resumed", resume_from_checkpoint=True) is None:  # else it has ended of itself
            s.make()
            s.train("resumed again", resume_from_checkpoint=True)


def _resumed_then_more(s: Session):
    s.make(s.interrupting("on_step_end", 9))
    s.train()
    if s.interrupts:
        s.make()
        s.train("resumed", resume_from_checkpoint=True)
    s.do("evaluates", s.trainer.evaluate)
    s.train("again")


def _evaluated_then_resumed(s: Session):
    s.make(s.interrupting("on_step_end", 9))
    s.train()
    if s.interrupts:
        s.make()
        s.do("evaluates", s.trainer.evaluate)
        s.train("resumed", resume_from_checkpoint=True)


def _nothing_to_resume(s: Session):
    s.make()
    s.train(resume_from_checkpoint=True)


calls("anew", _killed_then_anew, "anew")
calls("anew_after_evaluation", _killed_in_evaluation_then_anew, "anew")
calls("anew_after_update", _killed_in_update_then_anew, "anew")
calls("resumed_finished", _resumed({}, {}), "finished", saves=True)
calls("resumed_finished_same", _resumed({}, {}, same=True), "finished", saves=True)
calls("resumed_finished_oldest", _resumed({}, {}, wanted="oldest"), "finished", saves=True)
calls("resumed_oldest_same", _resumed({}, {}, wanted="oldest", same=True), "finished", saves=True)
for name, changes in {
    "epochs": {"num_train_epochs": 4},
    "save_steps": {"save_strategy": "steps", "save_steps": 2},
    "batch": {"per_device_train_batch_size": 2},
    "accumulation": {"gradient_accumulation_steps": 5},
    "log_steps": {"logging_steps": 5},
    "rate": {"learning_rate": 0.1},
    "limit": {"save_total_limit": 1},
    "no_saves": {"save_strategy": "no", "load_best_model_at_end": False},
    "skip": {"ignore_data_skip": True},
    "max_steps": {"max_steps": 19},
    "clip": {"max_grad_norm": 0.02},
}.items():
    calls(f"resumed_other_{name}", _resumed({"max_steps": 8}, changes), "changed", saves=True)
    calls(f"finished_other_{name}", _resumed({}, changes), "changed", saves=True)
calls("stopped_7", _stopped_at(7), "stopped", saves=True)
calls("stopped_13", _stopped_at(13), "stopped", saves=True)
calls("resumed_twice", _resumed_twice, "resumed_twice", resumes=True, saves=True)
calls("resumed_then_more", _resumed_then_more, "resumed_then_more", resumes=True, saves=True)
calls("evaluated_then_resumed", _evaluated_then_resumed, "evaluated_then_resumed", saves=True)
calls("nothing_to_resume", _nothing_to_resume, "nothing_to_resume")
