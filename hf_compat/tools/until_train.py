"""A user's script, run up to its first `train()`: what checks, explains or exports a run begins with its Trainer."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tqdm import tqdm

from hf_compat.errors import ScriptError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.interop import child_site, patching
from hf_compat.interop.user_script import run_module, run_script
from hf_compat.runtime.launch import let_children_import_from
from hf_compat.trainer import Trainer

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class UserScript:
    """A script and its command line.

    Args:
        path: A file, folder or archive; the name of a module with `is_module`.
        arguments: The words after it.
        is_module: Whether it is run as `python -m`.
    """

    path: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def run(self) -> None:
        """Run it as this process's `__main__`; what it raises is raised."""
        run = run_module if self.is_module else run_script
        run(self.path, self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedTrain:
    """A call of `train()` that a script made, and that was not carried out.

    Args:
        trainer: The Trainer, as the script has made it.
        positional: What the call passed by place.
        keywords: What it passed by name.
    """

    trainer: Trainer
    positional: tuple[object, ...]
    keywords: Mapping[str, object]


class _TrainReached(BaseException):
    """Ends the script where it would train; no `except Exception` of the script stops it."""


class _Interception(Generic[Result]):
    """Stands in the place of `Trainer.train`: the first call is used, this and each later one ends the script."""

    def __init__(self, use: Callable[[CapturedTrain], Result]) -> None:
        self._use = use
        self.results: list[Result] = []
        self.error: BaseException | None = None

    def __call__(self, trainer: Trainer, positional: tuple[object, ...], keywords: Mapping[str, object]) -> None:
        captured = CapturedTrain(trainer=trainer, positional=positional, keywords=keywords)
        if not self.results and self.error is None:
            try:
                self.results.append(self._use(captured))
            except BaseException as error:  # raised to the caller below: it is no error of the script
                self.error = error
        raise _TrainReached


def run_until_train(
    script: UserScript, use: Callable[[CapturedTrain], Result], overrides: Mapping[str, object] | None = None
) -> Result:
    """Run a script, unchanged, up to its first call of `train()`, and return what `use` makes of that call.

    The script runs as this process's `__main__`, with our names in the place of transformers' and an empty standard
    input, without progress bars and without logs below warnings. `use` is called in the place of the first `train()`;
    then the script ends. Call it once a process: what the script imports and sets stays.

    Args:
        script: What to run.
        use: From the captured call to the result. What it raises is raised as it is.
        overrides: Values of training arguments that count, whatever the script or its command line says.

    Raises:
        ScriptError: The script failed by itself, left early, asked for input, or never called `train()`.
    """
    patching.patch()
    let_children_import_from(child_site.FOLDER)
    interception = _Interception(use)
    with _train_intercepted(interception), arguments_overridden(overrides or {}), _no_input(), _quiet():
        ended = _ended(script)
    if interception.error is not None:
        raise interception.error
    if interception.results:
        return interception.results[0]
    raise ended


def _ended(script: UserScript) -> ScriptError:
    """Run the script to its end; return why it has not trained, should it turn out that it has not."""
    shown_by = sys.excepthook
    try:
        script.run()
    except _TrainReached:
        pass
    except SystemExit as left:
        code = left.code
        status = code if isinstance(code, int) else int(code is not None)
        words = f": {code}" if isinstance(code, str) else ""
        return ScriptError(
            f"{script.path} left by `sys.exit` with status {status} before it called `train()`{words}\n\n"
            "Hint: run it alone with the same arguments; what it prints says why.",
            status,
        )
    except Exception as error:
        if isinstance(error, EOFError):
            what = "asked for input before it called `train()`; there is nobody to answer"
            hint = "pass what it asks for on its command line."
        else:
            what, hint = "failed before it called `train()`", "run it alone with the same arguments until it trains."
        # The traceback from the script's first frame on, without those of the command above it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
            trace = trace.tb_next
        account = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        told = ScriptError(f"{script.path} {what}:\n\n{account}\nHint: {hint}", 1)
        told.__cause__ = error
        return told
    finally:
        sys.excepthook = shown_by
    return ScriptError(
        f"{script.path} has ended, and never called `train()` of a Trainer.\n\n"
        "Hint: give it the arguments that make it train, `--do_train` say; a script that trains under "
        '`if __name__ == "__main__":` is named itself, not what imports it.'
    )


@contextlib.contextmanager
def _train_intercepted(interception: _Interception[Result]) -> Iterator[None]:
    def train(self: Trainer, *positional: object, **keywords: object) -> None:
        interception(self, positional, keywords)

    carried_out = Trainer.train
    Trainer.train = train  # type: ignore[assignment,method-assign]  # it never returns
    try:
        yield
    finally:
        Trainer.train = carried_out  # type: ignore[method-assign]


@contextlib.contextmanager
def arguments_overridden(values: Mapping[str, object]) -> Iterator[None]:
    """Let training arguments that are made within have these values, whatever the script says."""
    finish = TrainingArguments.__post_init__

    def override_and_finish(self: TrainingArguments) -> None:
        # for who wants to know what the script itself has said
        vars(self)["_as_written"] = {name: getattr(self, name, None) for name in values}
        for name, value in values.items():
            setattr(self, name, value)
        finish(self)

    TrainingArguments.__post_init__ = override_and_finish  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingArguments.__post_init__ = finish  # type: ignore[method-assign]


def restore_as_written(args: TrainingArguments) -> None:
    """Give overridden arguments the values that the script has written; None becomes the default again."""
    for name, value in vars(args).get("_as_written", {}).items():
        setattr(args, name, value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what libraries show of their loading: progress bars, and logs that are no warnings."""
    init, level = tqdm.__init__, logging.root.manager.disable

    @functools.wraps(init)
    def init_disabled(self: tqdm[object], *positional: object, **named: object) -> None:
        init(self, *positional, **{**named, "disable": True})

    tqdm.__init__ = init_disabled
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        tqdm.__init__ = init
        logging.disable(level)


@contextlib.contextmanager
def _no_input() -> Iterator[None]:
    """Answer whoever reads from the standard input with its end, as a job without a terminal does."""
    found = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = found
