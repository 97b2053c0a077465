"""Run one side of a comparison: `python main.py SETTINGS`, or under torchrun, with settings in a JSON file.

It is run by its path, so that an interpreter without hf_compat can run it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .observing import Observer

_HERE = os.path.dirname(os.path.abspath(__file__))
_SHOWN_FRAMES = 7  # the innermost ones beside the script's own, while the log has all
_NAME = "_compared_by_hf_compat"


def main(settings_file: str) -> None:
    """Run the script that the settings name, and record it."""
    with open(settings_file, encoding="utf-8") as file:
        settings = json.load(file)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
    recording = _part("recording")
    rank = int(os.environ.get("RANK", "0"))  # noqa: TID251 - torchrun sets it, and runtime/ is out of reach
    record = recording.Record(settings["record_folder"], rank)
    try:
        script = _module("user_script", str(settings["user_script"]))
        if settings["engine"] == "hf_compat":
            importlib.import_module("hf_compat.interop.patching").patch()
        observer: Observer = _part("observing").Observer(
            record, str(settings["output_folder"]), int(str(settings["max_steps"]))
        )
        observer.install()
        versions = {name: importlib.import_module(name).__version__ for name in ("transformers", "torch")}
        record.write("start", engine=settings["engine"], python=sys.version.split()[0], versions=versions)
        record.flush()
        run = script.run_module if settings["is_module"] else script.run_script
        run(settings["script"], settings["arguments"])
        record.write("end", how="finished", status=0)
    except SystemExit as left:
        code = left.code
        status = code if isinstance(code, int) else int(code is not None)
        record.write("end", how="exit", status=status, account=code if isinstance(code, str) else "")
        raise
    except BaseException as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        record.write(
            "end", how="error", status=1, account=_account(error), error=type(error).__name__, missing=missing,
            wants_input=isinstance(error, EOFError),
        )  # fmt: skip
        raise
    finally:
        record.flush()


def _account(error: BaseException) -> str:
    """Format the traceback from the script's first frame on, without the frames of the observer."""
    first, here = error.__traceback__, os.path.abspath(__file__)  # this file was `__main__`, too, before the script
    while first is not None:
        frame = first.tb_frame
        if frame.f_globals.get("__name__") == "__main__" and os.path.abspath(frame.f_code.co_filename) != here:
            break
        first = first.tb_next
    told = traceback.TracebackException(type(error), error, first or error.__traceback__)
    one: traceback.TracebackException | None = told
    while one is not None:
        frames = [frame for frame in one.stack if not frame.filename.startswith(_HERE)]
        one.stack = traceback.StackSummary.from_list([*frames[:1], *frames[1:][-_SHOWN_FRAMES:]])
        one = one.__cause__ or one.__context__
    return "".join(told.format())


def _part(name: str) -> ModuleType:
    """Import a file beside this one, under a package name that no script uses."""
    if _NAME not in sys.modules:
        _module(_NAME, os.path.join(_HERE, "__init__.py"), [_HERE])
    return importlib.import_module(f"{_NAME}.{name}")


def _module(name: str, path: str, inner: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=inner)
    assert spec is not None and spec.loader is not None  # an existing Python file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
