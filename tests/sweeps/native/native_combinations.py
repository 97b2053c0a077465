"""Random combinations of settings, each through our Trainer, in a bare `lightning.Trainer`, and from a YAML.

    python tests/sweeps/native/native_combinations.py 200 0                 # 200 rows of seed 0
    python tests/sweeps/native/native_combinations.py 200 0 --only 17       # that row again, with the whole traceback
    python tests/sweeps/native/native_combinations.py --only '{"accumulation": 2, "resume": "native"}'

A row is 2 to 5 features (`combination_rows.py`). Losses, gradient norms, rates, weights, metrics, events, hooks, logs
and checkpoints are compared, bit for bit where both doors compute them alike. The status is 1 where a row differs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_TESTS))

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch import callbacks as plc
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tqdm import tqdm

import hf_compat
from helpers import toy
from helpers.parity.compare import same
from hf_compat import HFCallbackAdapter, HFDataModule, Trainer, TrainerCallback, TrainingArguments
from sweeps.native import combination_parts as parts
from sweeps.native import combination_rows as rows
from sweeps.native.combination_rows import PLAIN, Row

LIMIT_SECONDS = 120
_TIMED = ("_runtime", "_per_second", "_time")


class Difference(AssertionError):
    """Two doors do not do the same."""


@dataclass
class Outcome:
    """What a door has done.

    Attributes:
        updates: By update: loss, rate, norm of the gradients.
        evaluations: By update: the metrics.
        weights: Of the trained model.
        around: Metrics and logits of evaluations before and after the fit.
        files: Checkpoints of a ModelCheckpoint, with a sum of their weights.
        columns: What a CSV logger was given, by name.
        hooks: What a spy of Lightning's kind saw.
        events: What a spy of HF's kind saw.
    """

    updates: dict[int, tuple[float, ...]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    around: dict[str, object] = field(default_factory=dict)
    files: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[float]] = field(default_factory=dict)
    hooks: list[tuple[str, int, int]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)


# What both doors are made of ------------------------------------------------------------------------------------------
def make_model(row: Row):
    hf_compat.set_seed(3)
    kinds = {"tagged": toy.Tagger, "masked": toy.Tagger, "gpt2": toy.tiny_gpt2, "lora": parts.lora}
    if row["arguments"] == "label_smoothing" and row["task"] in ("tagged", "masked"):
        return toy.tagger_with_config()
    return kinds.get(str(row["task"]), parts.classifier)()


def make_sets(row: Row):
    task = str(row["task"])
    trains = {"rows": parts.train_rows, "masked": parts.tagged, "gpt2": parts.blocks, "lora": parts.blocks}
    train = (trains.get(task) or getattr(parts, task))()
    evaluates = {"tagged": parts.eval_tagged, "masked": parts.eval_tagged, "gpt2": parts.eval_blocks,
                 "lora": parts.eval_blocks}.get(task, parts.eval_rows)  # fmt: skip
    samples = evaluates()
    return train, ({"a": samples, "b": samples[:4]} if row["sets"] == "two" else samples), samples[:7]


def collator(row: Row) -> dict[str, object]:
    return {"data_collator": {"tagged": toy.pad, "masked": toy.mask_at_random}.get(str(row["task"]))}


def metrics_of(row: Row):
    kinds = {
        "none": None,
        "function": parts.accuracy,
        "torchmetrics": parts.metric(),
        "torchmetrics class": parts.metric,
    }
    return kinds[str(row["metrics"])]


def lightning_callbacks(row: Row, folder: Path) -> list[pl.Callback]:
    """Return the callbacks of Lightning's kind, which both doors are given."""
    name = rows.followed(row)["metric_for_best_model"]
    given: list[pl.Callback] = []
    if row["stopping"] == "lightning":
        given.append(plc.EarlyStopping(name, patience=1))
    best = {"monitor": name, "filename": "{epoch}-{step}", "save_top_k": 2}
    kinds = {
        "best": [best],
        "every 3": [{"filename": "{step}", "every_n_train_steps": 3, "save_top_k": -1}],
        "best and last": [best, {"filename": "l-{step}", "save_last": True, "save_top_k": 0, "every_n_train_steps": 1}],
        "none": [],
    }[str(row["checkpoints"])]
    given += [plc.ModelCheckpoint(folder / f"kept_{i}", **kind) for i, kind in enumerate(kinds)]
    if row["rates"]:
        given.append(plc.LearningRateMonitor("step"))
    averages = {"swa": lambda: plc.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
                "ema": lambda: plc.EMAWeightAveraging(decay=0.5), "none": None}[str(row["averages"])]  # fmt: skip
    return [*given, averages()] if averages else given


def lightning_loggers(row: Row, folder: Path) -> list:
    kind = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "none": None}[str(row["logger"])]
    chosen = kind or (CSVLogger if row["rates"] else None)  # the monitor asks for one
    return [chosen(folder / "logs", name="", version=0)] if chosen else []


class Watch(pl.Callback):
    """Keeps what a native fit measures."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch.is_complete:
            logged = trainer.callback_metrics
            values = tuple(float(logged[name]) for name in ("loss", "learning_rate", "grad_norm") if name in logged)
            self.outcome.updates[trainer.global_step] = values

    def on_validation_end(self, trainer, pl_module) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.outcome.evaluations[trainer.global_step] = evaluated(trainer.callback_metrics)


def evaluated(metrics) -> dict[str, float]:
    return {
        name: float(np.float32(float(value)))
        for name, value in metrics.items()
        if name.startswith(("eval_", "test_")) and not name.endswith(_TIMED)
    }


class When(TrainerCallback):
    """Asks our Trainer to evaluate, and to leave an epoch, where a Lightning trainer is told to."""

    def __init__(self, lengths: rows.Lengths) -> None:
        self.lengths = lengths

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step in self.lengths.moments
        if self.lengths.epoch < self.lengths.whole_epoch and state.global_step % self.lengths.epoch == 0:
            control.should_epoch_stop = True
        return control


class WatchTrainer(TrainerCallback):
    """Keeps what our Trainer measures."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            names = [name for name in ("loss", "learning_rate", "grad_norm") if name in logs]
            self.outcome.updates[state.global_step] = tuple(float(np.float32(logs[name])) for name in names)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.outcome.evaluations.setdefault(state.global_step, {}).update(evaluated(metrics))


# Doors ----------------------------------------------------------------------------------------------------------------
def arguments(folder: Path, row: Row, more: dict[str, object]) -> TrainingArguments:
    return TrainingArguments(str(folder / "out"), **rows.shared_arguments(row), **more)


def by_trainer(row: Row, folder: Path, resume: str | None = None) -> Outcome:
    """Train with our Trainer."""
    outcome, spy, events = Outcome(), parts.Spy(), parts.HFSpy()
    model = make_model(row)
    train, evaluation, test = make_sets(row)
    callbacks = [When(rows.lengths_of(row)), WatchTrainer(outcome), *lightning_callbacks(row, folder)]
    callbacks += lightning_loggers(row, folder)
    if row["stopping"] == "hf":
        callbacks.append(hf_compat.EarlyStoppingCallback(1))
    callbacks += [spy, events] if row["spies"] else []
    trainer = Trainer(
        model, arguments(folder, row, {**rows.trainer_arguments(row), **saving(row)}), train_dataset=train,
        eval_dataset=None if row["validation"] == "none" else evaluation, compute_metrics=metrics_of(row),
        callbacks=callbacks, **collator(row),
    )  # fmt: skip
    if row["around"] in ("validate", "all"):
        outcome.around["validate"] = evaluated(_evaluate(trainer, evaluation))
        outcome.evaluations.clear()
    _forget(spy, events)
    trainer.train(resume_from_checkpoint=resume)
    outcome.weights = weights_of(model)
    outcome.hooks, outcome.events = [*spy.seen], [*events.seen]
    if row["around"] in ("test", "all"):
        outcome.around["test"] = evaluated(trainer.predict(test).metrics)
    if row["around"] in ("predict", "all"):
        outcome.around["predict"] = trainer.predict(test).predictions
    return _with_files(outcome, folder)


def _evaluate(trainer: Trainer, evaluation) -> dict[str, float]:
    if not isinstance(evaluation, dict):
        return trainer.evaluate(evaluation)
    return {k: v for name, part in evaluation.items() for k, v in trainer.evaluate(part, None, f"eval_{name}").items()}


def saving(row: Row) -> dict[str, object]:
    if row["resume"] != "from trainer":
        return {}
    return {"save_strategy": "steps", "save_steps": resumed_at(row)}


def resumed_at(row: Row) -> int:
    """Return an update within the run, within an epoch where there is room for it."""
    return max(1, min(rows.lengths_of(row).updates - 1, 4))


def make_native(row: Row, folder: Path, outcome: Outcome, callbacks=()):
    args = arguments(folder, row, rows.native_arguments(row))
    module = parts.MODULES[str(row["module"])](make_model(row), args, compute_metrics=metrics_of(row))
    train, evaluation, test = make_sets(row)
    data = HFDataModule(None, train, evaluation, test, **collator(row))
    given = [Watch(outcome), *lightning_callbacks(row, folder), *callbacks]
    if row["stopping"] == "hf":
        told = arguments(folder, row, {**rows.followed(row), "eval_strategy": "epoch"})
        given.append(HFCallbackAdapter(hf_compat.EarlyStoppingCallback(1), args=told))
    trainer = pl.Trainer(
        **rows.lightning_options(row), callbacks=given, logger=lightning_loggers(row, folder) or False,
        default_root_dir=folder,
    )  # fmt: skip
    return trainer, module, data


def natively(row: Row, folder: Path, resume: str | None = None) -> Outcome:
    """Train in a bare Lightning trainer; then once more, or from a checkpoint, where the row says so."""
    outcome, spy, events = Outcome(), parts.Spy(), parts.HFSpy()
    watching = [spy, HFCallbackAdapter(events)] if row["spies"] else []
    if row["resume"] in ("native", "last", "to trainer") and resume is None:
        watching.append(keeper(row, folder))
    trainer, module, data = make_native(row, folder, outcome, watching)
    if row["around"] in ("validate", "all"):
        trainer.validate(module, data, verbose=False)
        outcome.around["validate"] = evaluated(trainer.callback_metrics)
    _forget(spy, events)
    trainer.fit(module, data, ckpt_path=resume)
    outcome.weights = weights_of(module.model)
    outcome.hooks, outcome.events = [*spy.seen], [*events.seen]
    if row["around"] in ("test", "all"):
        trainer.test(module, data, verbose=False)
        outcome.around["test"] = evaluated(trainer.callback_metrics)
    if row["around"] in ("predict", "all"):
        outcome.around["predict"] = joined(trainer.predict(module, data))
    _with_files(outcome, folder)
    if row["second"] == "fit again":
        _fit_again(row, trainer, module, data, outcome)
    return outcome


def keeper(row: Row, folder: Path) -> plc.ModelCheckpoint:
    return plc.ModelCheckpoint(folder / "resume", "{step}", every_n_train_steps=resumed_at(row), save_top_k=-1)


def _fit_again(row: Row, trainer: pl.Trainer, module, data, outcome: Outcome) -> None:
    """A second fit is as long as the first, with a schedule of its own, and is evaluated as often."""
    first, evaluations = dict(outcome.updates), sorted(outcome.evaluations)
    seen: Outcome = Outcome()
    next(c for c in trainer.callbacks if isinstance(c, Watch)).outcome = seen
    folder = Path(trainer.default_root_dir) / "2"
    again = pl.Trainer(
        **rows.lightning_options(row), callbacks=[Watch(seen), *lightning_callbacks(row, folder)],
        logger=CSVLogger(folder) if row["rates"] else False, default_root_dir=folder,
    )  # fmt: skip
    again.fit(module, data)
    if row["schedule"] == "reduce_lr_on_plateau" or row["stopping"] != "none":
        return
    expect("the rates of a second fit", {n: u[1] for n, u in seen.updates.items()}, {n: u[1] for n, u in first.items()})
    expect("the evaluations of a second fit", sorted(seen.evaluations), evaluations)


def joined(predictions):
    """Return the logits of all batches, filled up as HF does."""
    if isinstance(predictions[0], (tuple, list)):
        return tuple(joined([batch[i] for batch in predictions]) for i in range(len(predictions[0])))
    longest = max(batch.shape[1] for batch in predictions) if predictions[0].dim() > 2 else 0
    filled = []
    for batch in predictions:
        if longest:
            batch = torch.nn.functional.pad(batch, (0, 0, 0, longest - batch.shape[1]), value=-100)
        filled.append(batch.float().numpy())
    return np.concatenate(filled)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _with_files(outcome: Outcome, folder: Path) -> Outcome:
    for path in sorted(folder.glob("kept_*/*.ckpt")):
        held = torch.load(path, weights_only=True)["state_dict"]
        outcome.files[f"{path.parent.name}/{path.name}"] = sum(float(t.double().sum()) for t in held.values())
    for path in folder.glob("logs/version_0/metrics.csv"):
        for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            for name, value in line.items():
                plain = name.removeprefix("train/")
                if value and (plain in ("loss", "grad_norm", "learning_rate") or name.startswith("lr-")):
                    outcome.columns.setdefault(plain, []).append(float(np.float32(float(value))))
    return outcome


def _forget(*spies) -> None:
    for spy in spies:  # what comes before a fit has other calls
        spy.seen.clear()


# The third door -------------------------------------------------------------------------------------------------------
def from_yaml(row: Row, folder: Path) -> Outcome:
    """Train the same from a YAML, with LightningCLI in this process."""
    from lightning.pytorch.cli import LightningCLI

    outcome = Outcome()
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(configuration(row, folder)), encoding="utf-8")
    module = parts.MODULES[str(row["module"])]
    cli = LightningCLI(
        module, HFDataModule, args=["fit", "-c", str(path)], save_config_callback=None,
        trainer_defaults={"callbacks": [Watch(outcome)]},
    )  # fmt: skip
    outcome.weights = weights_of(cli.model.model)
    return outcome


def configuration(row: Row, folder: Path) -> dict[str, object]:
    task = str(row["task"])
    models = {
        "tagged": "helpers.toy.Tagger",
        "masked": "helpers.toy.Tagger",
        "gpt2": "helpers.toy.tiny_gpt2",
        "lora": "sweeps.native.combination_parts.lora",
    }
    trains = {"rows": "train_rows", "masked": "tagged", "gpt2": "blocks", "lora": "blocks"}
    evaluates = {"tagged": "eval_tagged", "masked": "eval_tagged", "gpt2": "eval_blocks", "lora": "eval_blocks"}
    data: dict[str, object] = {
        "train_dataset": {"class_path": f"combination_parts.{trains.get(task, task)}"},
        "eval_dataset": {"class_path": f"combination_parts.{evaluates.get(task, 'eval_rows')}"},
    }
    collate = {"tagged": "helpers.toy.pad", "masked": "helpers.toy.mask_at_random"}.get(task)
    if collate:
        data["data_collator"] = collate
    metrics = {"none": None, "function": "combination_parts.accuracy", "torchmetrics": "combination_parts.metric",
               "torchmetrics class": "combination_parts.metric"}[str(row["metrics"])]  # fmt: skip
    args = {**rows.shared_arguments(row), **rows.native_arguments(row), "output_dir": str(folder / "out")}
    return {
        "seed_everything": 3,
        "model": {
            "model": {"class_path": models.get(task, "combination_parts.classifier")},
            "args": args,
            **({"compute_metrics": metrics} if metrics else {}),
        },
        "data": data,
        "trainer": {
            **rows.lightning_options(row),
            "logger": False,
            "enable_checkpointing": False,
            "default_root_dir": str(folder),
            "callbacks": [],
        },
    }


def goes_into_yaml(row: Row) -> bool:
    plain = ("stopping", "checkpoints", "rates", "spies", "averages", "sets", "logger")
    return bool(row["yaml"]) and all(row[name] == PLAIN[name] for name in plain)


# Comparing ------------------------------------------------------------------------------------------------------------
def expect(what: str, mine, theirs) -> None:
    if not same(mine, theirs):
        raise Difference(f"{what}: {_first(mine, theirs)}")


def _first(mine, theirs) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in [*mine, *(n for n in theirs if n not in mine)]:
            a, b = mine.get(name, "absent"), theirs.get(name, "absent")
            if not same(a, b):
                return f"{name}: {_first(a, b)}"
    if isinstance(mine, list) and isinstance(theirs, list):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if not same(a, b):
                return f"[{i}] {a!r} | {b!r} (of {len(mine)} and {len(theirs)})"
        return f"{len(mine)} and {len(theirs)}: {mine[len(theirs) :][:3] or theirs[len(mine) :][:3]}"
    return f"{str(mine)[:200]} | {str(theirs)[:200]}"


def compare(row: Row, native: Outcome, hf: Outcome) -> None:
    """Compare a native run (first in messages) with that of our Trainer."""
    expect("updates", native.updates, hf.updates)
    expect("evaluations", only_known(native.evaluations), only_known(hf.evaluations))
    expect("weights", native.weights, hf.weights)
    expect("checkpoints", native.files, hf.files)
    expect("around: " + str(row["around"]), _rounded(native.around), _rounded(hf.around))
    expect("logged columns", native.columns, hf.columns)
    if row["spies"]:
        expect("hooks", _hooks(native.hooks), _hooks(hf.hooks))
        expect("events", _events(native.events), _events(hf.events))


def only_known(evaluations: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {n: dict(sorted(metrics.items())) for n, metrics in evaluations.items()}


def _rounded(around: dict[str, object]) -> dict[str, object]:
    return {k: v.astype(np.float32) if isinstance(v, np.ndarray) else v for k, v in around.items()}


_OF_UPDATES = (
    "on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_train_epoch_start", "on_train_epoch_end", "on_train_start",
    "on_train_end", "on_validation_start", "on_validation_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_fit_start", "on_fit_end", "setup fit", "teardown fit",
)  # fmt: skip


def _hooks(seen: list[tuple[str, int, int]]) -> dict[str, list[tuple[int, int]]]:
    return {name: [(step, epoch) for hook, step, epoch in seen if hook == name] for name in _OF_UPDATES}


def _events(seen: list[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the updates of each event; several sets are one validation to Lightning, and several events to HF."""
    names = [
        name for name in toy.EVENTS if name not in ("on_init_end", "on_substep_end", "on_save", "on_log", "on_predict")
    ]
    return {name: sorted({step for event, step in seen if event == name}) for name in names}


def resumed(row: Row, folder: Path, whole: Outcome) -> None:
    """Go on from a checkpoint; what follows is what the uninterrupted run did."""
    at = resumed_at(row)
    ways = {
        "native": lambda: natively(row, folder / "b", str(folder / "native" / "resume" / f"step={at}.ckpt")),
        "last": lambda: natively(row, folder / "b", _last(folder / "native", folder / "b", at)),
        "to trainer": lambda: by_trainer(row, folder / "b", str(folder / "native" / "resume" / f"step={at}.ckpt")),
        "from trainer": lambda: natively(row, folder / "b", str(folder / "trainer" / "out" / f"checkpoint-{at}")),
    }
    on = ways[str(row["resume"])]()
    expect("updates after a resume", on.updates, {n: v for n, v in whole.updates.items() if n > at})
    expect("evaluations after a resume", on.evaluations, {n: v for n, v in whole.evaluations.items() if n > at})
    expect("weights after a resume", on.weights, whole.weights)


def _last(source: Path, target: Path, at: int) -> str:
    """Return "last", with the file where Lightning looks for it."""
    (target / "checkpoints").mkdir(parents=True)
    return str(source / "resume" / f"step={at}.ckpt")


# Rows -----------------------------------------------------------------------------------------------------------------
def run(row: Row, folder: Path) -> None:
    """Run a row through its doors.

    Raises:
        Difference: They do not do the same.
    """
    full = {**PLAIN, **row}
    native, hf = natively(full, folder / "native"), by_trainer(full, folder / "trainer")
    compare(full, native, hf)
    if full["resume"] != "none":
        resumed(full, folder, hf)
    if goes_into_yaml(full):
        other = from_yaml(full, folder)
        expect("updates from a YAML", other.updates, native.updates)
        expect("evaluations from a YAML", other.evaluations, native.evaluations)
        expect("weights from a YAML", other.weights, native.weights)


@contextlib.contextmanager
def quiet():
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def time_limit():
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_row(row: Row) -> str:
    """Run a row; return `equal`, or what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="combinations_") as place, quiet(), contextlib.chdir(place), time_limit():
        try:
            run(row, Path(place))
        except Difference as difference:
            return f"DIFFERS {difference}"
        except Exception as error:
            return f"FAILED {type(error).__name__}: {error}\n{traceback.format_exc()}"
        finally:
            os.environ.pop("PL_GLOBAL_SEED", None)
    return "equal"


def shrink(row: Row, verdict: str) -> Row:
    """Leave features out while the row stays wrong in the same way."""
    kind = verdict.split(":")[0]
    for name in list(row):
        fewer = {k: v for k, v in row.items() if k != name}
        if rows.why_not(fewer) is None and try_row(fewer).split(":")[0] == kind:
            row = fewer
    return row


def drawn(count: int, seed: int) -> list[Row]:
    generator = random.Random(seed)
    return [rows.draw(generator) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=50, help="rows")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of the draw")
    parser.add_argument("--only", help="the number of one row, or a row as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.only:
        row = (
            json.loads(chosen.only)
            if chosen.only.startswith("{")
            else drawn(chosen.count, chosen.seed)[int(chosen.only)]
        )
        print(json.dumps(row), "\n" + try_row(row))
        return 0
    found: Counter[str] = Counter()
    for number, row in enumerate(tqdm(drawn(chosen.count, chosen.seed), dynamic_ncols=True, mininterval=1)):
        verdict = try_row(row)
        found[verdict.split(" ")[0]] += 1
        if verdict != "equal":
            small = shrink(row, verdict)
            tqdm.write(f"{number} {json.dumps(small)}\n    {try_row(small).splitlines()[0]}")
    print(dict(found))
    return 0 if set(found) <= {"equal"} else 1


if __name__ == "__main__":
    sys.exit(main())
