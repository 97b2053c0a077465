"""Run a user's script up to its first `train()`, and find what is the user's in its Trainer.

The commands that check, explain or export a run use it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

from hf_compat.errors import ScriptError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.interop import child_site, patching
from hf_compat.interop.user_script import run_module, run_script
from hf_compat.runtime.inspection import home_of
from hf_compat.runtime.launch import let_children_import_from
from hf_compat.trainer import Trainer

Result = TypeVar("Result")
_OWN = ("hf_compat.", "transformers.")


@dataclass(frozen=True, kw_only=True, slots=True)
class UserScript:
    """A script and its command line."""

    path: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedTrain:
    """A script's call of `train()`, which was not carried out."""

    trainer: Trainer
    positional: tuple[object, ...]
    keywords: Mapping[str, object]


class _TrainReached(BaseException):
    """Ends the script at its `train()`. No `except Exception` of the script stops it."""


def run_until_train(
    script: UserScript, use: Callable[[CapturedTrain], Result], overrides: Mapping[str, object] | None = None
) -> Result:
    """Run an unchanged script up to its first call of `train()`, and give the result of `use` for that call.

    The script runs as this process's `__main__`, with our names instead of transformers'. Its standard input is empty,
    and progress bars and logs below warnings are off. `use` is called instead of the first `train()`, and then the
    script ends. Call this once a process, because the script's imports and settings stay.

    Args:
        script: The script.
        use: Makes the result from the captured call. Its exceptions are raised unchanged.
        overrides: Values of training arguments that replace those of the script or its command line.

    Raises:
        ScriptError: The script failed by itself, left early, asked for input, or never called `train()`.
    """
    patching.patch()
    let_children_import_from(child_site.FOLDER)
    results: list[Result] = []
    errors: list[BaseException] = []
    own_train = vars(Trainer)["train"]

    def train(self: Trainer, *positional: object, **keywords: object) -> None:
        if not results and not errors:
            try:
                with replaced(Trainer, "train", own_train):  # a check trains
                    results.append(use(CapturedTrain(trainer=self, positional=positional, keywords=keywords)))
            except BaseException as error:  # raised to the caller below, because it is not an error of the script
                errors.append(error)
        raise _TrainReached

    values, finish = overrides or {}, TrainingArguments.__post_init__

    def override_and_finish(self: TrainingArguments) -> None:
        # `restore_as_written` needs the script's own values
        vars(self)["_as_written"] = {name: getattr(self, name, None) for name in values}
        for name, value in values.items():
            setattr(self, name, value)
        finish(self)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(Trainer, "train", train))
        stack.enter_context(replaced(TrainingArguments, "__post_init__", override_and_finish))
        # An empty standard input, as in a job without a terminal
        stack.enter_context(replaced(sys, "stdin", stack.enter_context(open(os.devnull, encoding="utf-8"))))
        # No progress bars, and no logs below warnings, which libraries show while they load
        init: Callable[..., None] = tqdm.__init__
        stack.enter_context(
            replaced(tqdm, "__init__", lambda *given, **named: init(*given, **{**named, "disable": True}))
        )
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.INFO)
        ended = _ended(script)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    raise ended


def _ended(script: UserScript) -> ScriptError:
    """Run the script to its end, and explain why it has not trained, in case it has not."""
    shown_by = sys.excepthook
    try:
        (run_module if script.is_module else run_script)(script.path, script.arguments)
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
            what = "asked for input before it called `train()`, and this command gives none"
            hint = "pass what it asks for on its command line."
        else:
            what, hint = "failed before it called `train()`", "run it alone with the same arguments until it trains."
        # The traceback from the script's first frame on, without the frames of the command
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
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute within a context."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def restore_as_written(args: TrainingArguments) -> None:
    """Give overridden arguments the script's values again. None becomes the default again."""
    for name, value in vars(args).get("_as_written", {}).items():
        setattr(args, name, value)


def overrides_of(trainer: Trainer) -> Iterator[tuple[str, str, object]]:
    """Yield the methods of HF's Trainer that are the user's: name, owner and the first value.

    They belong to a subclass or to this object, or the script has put them on our own class.
    """
    seen = set[str]()
    for owner in (trainer, *type(trainer).__mro__):
        is_ours = isinstance(owner, type) and home_of(owner).startswith(_OWN)
        # our methods that torch has decorated are still ours
        homes = (*_OWN, "torch.") if is_ours else _OWN[:1]
        for name, value in vars(owner).items():
            is_users = callable(value) and not home_of(value).startswith(homes)
            if is_users and name not in seen and callable(getattr(Trainer, name, None)) and not name.startswith("__"):
                seen.add(name)
                yield name, (owner if isinstance(owner, type) else type(owner)).__name__, value


def overrides(trainer: Trainer, name: str) -> bool:
    """Whether a method is the user's."""
    return any(name == one for one, *_ in overrides_of(trainer))
