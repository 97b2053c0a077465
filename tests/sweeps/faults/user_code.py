"""Faults in user code, each tried in a plain run, with loader workers, and with saves in the background.

    python tests/sweeps/faults/user_code.py [--only WORDS] [--columns plain,workers,async_save]

A cell is well when the right error comes out (the user's own as it is; ours names the thing), within the time limit,
nothing is left in the process, and the same Trainer, the fault repaired, then trains as a fresh one does, bit for bit.
The status is 1 if a cell is not.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import logging
import multiprocessing.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers import toy
from helpers.leftovers import Picture, children, holders_of_shared_tensors, hooks
from helpers.parity.compare import first_difference, same
from hf_compat import Trainer, TrainingArguments, set_seed
from hf_compat.errors import HfCompatError
from sweeps.faults import training_faults  # noqa: F401 - brings its faults, and those of data
from sweeps.faults.user_faults import EVAL_ROWS, FAULTS, ROWS, Expected, Fault, Switch

COLUMNS = ("plain", "workers", "async_save")
LIMIT_SECONDS = 120
TIMES = ("runtime", "per_second", "preparation_time")


def arguments(column: str, folder: str, values: dict[str, Any]) -> TrainingArguments:
    of_column = {"workers": {"dataloader_num_workers": 2}, "async_save": {"async_save": True}}.get(column, {})
    base = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 3,
        "load_best_model_at_end": True,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": False,
    }
    return TrainingArguments(output_dir=folder, **{**base, **of_column, **values})


def make(fault: Fault, switch: Switch, column: str, folder: str) -> tuple[Trainer, Any]:
    """Return a Trainer of the fault's parts, and what repairs it."""
    set_seed(3)
    parts = fault.parts(switch)
    repair, kind = parts.pop("repair", fault.repair), parts.pop("trainer", Trainer)
    args = arguments(column, folder, parts.pop("args", {}))
    model = None if "model_init" in parts else parts.pop("model", toy.Classifier)()
    chosen = {"train_dataset": ROWS, "eval_dataset": EVAL_ROWS, **parts}
    with contextlib.redirect_stdout(io.StringIO()):
        return kind(model, args, **chosen), repair


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return what has to be equal: weights and history, without durations."""
    history = [
        {name: value for name, value in entry.items() if not name.endswith(TIMES)}
        for entry in trainer.state.log_history
    ]
    return {"weights": dict(trainer.model.state_dict()), "history": history, "updates": trainer.state.global_step}


class Cell:
    """One fault in one kind of run.

    Args:
        fault: The fault.
        column: The kind of run.
        folder: An empty folder.
    """

    def __init__(self, fault: Fault, column: str, folder: Path):
        self.fault, self.column, self.folder = fault, column, folder
        self.switch = Switch()
        self.wrong: list[str] = []
        in_workers = fault.in_workers if column == "workers" else None
        self.expected: Expected = in_workers or fault.expected

    def run(self) -> list[str]:
        """Return what is wrong."""
        reference = self.reference()
        before = Picture()
        trainer, repair, initial = self.fail()
        self.compare(before, "after the fault")
        if trainer is not None:
            self.wrong += [f"after the fault: hook {name}" for name in hooks(trainer.model)]
        self.switch.on = False
        if trainer is None:
            trainer, repair = make(self.fault, self.switch, self.column, str(self.folder / "run"))
            initial = None
        repair(trainer)
        again = self.again(trainer, initial)
        if again is not None and not same(again, reference):
            self.wrong.append(f"trains otherwise afterwards: {first_difference(reference, again)[:300]}")
        del trainer, again, repair
        self.compare(before, "in the end")
        return self.wrong

    def reference(self) -> dict[str, Any]:
        switch = Switch()
        switch.on = False
        fresh, _ = make(self.fault, switch, self.column, str(self.folder / "fresh"))
        fresh.train()
        return outcome(fresh)

    def fail(self) -> tuple[Trainer | None, Any, dict[str, Any] | None]:
        trainer = initial = repair = None
        said = io.StringIO()
        try:
            with listening(said):
                trainer, repair = make(self.fault, self.switch, self.column, str(self.folder / "run"))
                initial = copy.deepcopy(dict(trainer.model.state_dict()))
                trainer.train()
        except BaseException as error:
            self.judge(error, said.getvalue())
            if children():
                self.wrong.append(f"processes run while the error is handled: {children()}")
        else:
            self.judge(None, said.getvalue() + str(trainer.state.log_history), trainer.state.global_step)
        left = [path.name for path in (self.folder / "run").glob(".saving-*")]
        self.wrong += [f"{name} is left" for name in left]
        return trainer, repair, initial

    def judge(self, error: BaseException | None, said: str, updates: int | None = None) -> None:
        expected = self.expected
        if error is None:
            text = said
            if expected.kinds:
                self.wrong.append(f"no error, {updates} updates; expected {expected.kinds[0].__name__}")
                return
            if expected.updates not in (None, updates):
                self.wrong.append(f"{updates} updates, expected {expected.updates}")
        else:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if not expected.kinds or not isinstance(error, expected.kinds):
                self.wrong.append(f"{type(error).__name__}: {text[-300:]}")
                if os.environ.get("SHOW"):
                    traceback.print_exception(error)
                return
            if expected.own and isinstance(error, HfCompatError):
                self.wrong.append(f"{type(error).__name__} in place of the user's own error: {text[:200]}")
        missing = [word for word in expected.words if word not in text]
        if missing:
            self.wrong.append(f"does not say {missing}: {text[-300:]}")

    def again(self, trainer: Trainer, initial: dict[str, Any] | None) -> dict[str, Any] | None:
        """Train the same Trainer once more: from its beginning, or from the last checkpoint."""
        resumes = self.fault.then == "resume"
        if initial is not None and not resumes:
            trainer.model.load_state_dict(initial)
            trainer.optimizer = trainer.lr_scheduler = None
        set_seed(trainer.args.seed)  # as the constructor does
        try:
            trainer.train(resume_from_checkpoint=resumes or None)
        except BaseException as error:
            self.wrong.append(f"does not train afterwards: {type(error).__name__}: {str(error)[:300]}")
            if os.environ.get("SHOW"):
                traceback.print_exception(error)
            return None
        return outcome(trainer)

    def compare(self, before: Picture, moment: str) -> None:
        # workers and their queues end in threads of their own, which a busy machine lets wait
        give_up = time.monotonic() + 20
        while (left := Picture().left_since(before)) and time.monotonic() < give_up:
            time.sleep(0.2)
        self.wrong += [f"{moment}: {what}" for what in left]
        if any("/dev/shm" in what for what in left):
            self.wrong += [f"{moment}: a tensor of a worker is held by {who}" for who in holders_of_shared_tensors()]


@contextlib.contextmanager
def listening(said: io.StringIO) -> Iterator[None]:
    """Write down warnings and what hf_compat logs."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.write(record.getMessage() + "\n")

    handler, logger = Handler(), logging.getLogger("hf_compat")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        said.write("\n".join(str(warning.message) for warning in caught))
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out bars and warnings: a table is printed."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        if os.environ.get("SHOW"):
            yield
            return
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


def try_cell(fault: Fault, column: str) -> list[str]:
    """Run one cell in a folder of its own; return what is wrong."""
    place = Path(tempfile.mkdtemp(prefix="user_code_"))
    tempfile.tempdir = temporary_folder()  # others write to the machine's own
    try:
        with quiet():
            return Cell(fault, column, place).run()
    finally:
        tempfile.tempdir = None
        shutil.rmtree(place, ignore_errors=True)


@functools.cache
def temporary_folder() -> str:
    """Make this process's own folder for temporary files; multiprocessing keeps one in it."""
    folder = tempfile.mkdtemp(prefix="user_code_temporary_")
    # after multiprocessing's own, which has the priority -100
    multiprocessing.util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)
    before, tempfile.tempdir = tempfile.tempdir, folder
    multiprocessing.util.get_temp_dir()
    tempfile.tempdir = before
    return folder


@functools.cache
def warm_up() -> None:
    """Do once what a process does once: torch's handler for workers, imports, threads of libraries."""
    for column in COLUMNS:
        try_cell(next(one for one in FAULTS if one.key == "model: raises"), column)


def serve() -> None:
    """Try the cells whose names come in by standard input, one a line; answer by a line each."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    faults = {fault.key: fault for fault in FAULTS}
    warm_up()
    for line in sys.stdin:
        key, column = json.loads(line)
        try:
            wrong = try_cell(faults[key], column)
        except BaseException:
            wrong = [traceback.format_exc()[-600:]]
        answers.write(json.dumps(wrong) + "\n")


class Runner:
    """A process that tries cells; one that hangs is ended and replaced."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def try_cell(self, fault: Fault, column: str) -> list[str]:
        if self.process is None:
            command = [sys.executable, __file__, "--serve"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        self.process.stdin.write(json.dumps([fault.key, column]) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_SECONDS)
        line = self.process.stdout.readline() if ready else None
        if line:
            return json.loads(line)
        self.stop()
        return ["has ended the process"] if ready else [f"hangs for {LIMIT_SECONDS} s"]

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
        self.process = None


def run(faults: list[Fault], columns: tuple[str, ...]) -> int:
    """Try the cells, print the table; return the status."""
    from tqdm import tqdm

    runner, bad, rows = Runner(), 0, []
    bar = tqdm(total=len(faults) * len(columns), disable=not sys.stderr.isatty())
    try:
        for fault in faults:
            marks = []
            for column in columns:
                bar.set_description(fault.key[:40])
                wrong = runner.try_cell(fault, column) if column in fault.columns else None
                marks.append("—" if wrong is None else "WRONG" if wrong else "well")
                bad += bool(wrong)
                for line in wrong or ():
                    bar.write(f"!! {fault.key} [{column}]: {line}")
                bar.update()
            rows.append([fault.subject, fault.name, expectation(fault.expected), *marks])
    finally:
        bar.close()
        runner.stop()
    print_table([["subject", "fault", "ends in", *columns], *rows])
    cells = sum(mark != "—" for row in rows for mark in row[3:])
    print(f"{len(rows)} faults, {cells} cells, {bad} wrong")
    return 1 if bad else 0


def expectation(expected: Expected) -> str:
    if not expected.kinds:
        return "the end of training"
    return f"{expected.kinds[0].__name__}{' (own)' if expected.own else ''}"


def print_table(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name holds these words")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="kinds of run")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve:
        serve()
        return 0
    chosen = [fault for fault in FAULTS if given.only in fault.key]
    return run(chosen, tuple(given.columns.split(",")))


if __name__ == "__main__":
    sys.exit(main())
