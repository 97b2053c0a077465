"""Run a script or module in this process, as `python script.py` and `python -m module` do."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.arguments_rules import generation_beside
from hf_compat.runtime.launch import read_launch

_OF_ARGUMENTS = (".json", ".yaml", ".yml", ".toml", ".args", ".txt")


def require_script(path: str, usage: str) -> None:
    """Check a path before anything is run."""
    if not os.path.exists(path):
        where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        raise ArgumentError(f"There is no script {path}{where}.\n\nHint: `{usage}`.")
    if path.endswith(_OF_ARGUMENTS) and os.path.isfile(path):
        raise ArgumentError(
            f"{path} is not a Python script.\n\nHint: `{usage}`. A file of arguments follows the script; "
            "`hf-compat fit --config` reads a configuration of LightningCLI."
        )
    if path.endswith(".ipynb") and not os.path.isdir(path):
        raise ArgumentError(
            f"{path} is a notebook, not a script: `{usage}`.\n\nHint: `jupyter nbconvert --to script {path}` makes a "
            "script of it. To train in the notebook itself, begin it with `import hf_compat; hf_compat.patch()`. "
            "`hf-compat migrate` rewrites notebooks, too."
        )


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script, or a folder or archive that holds a `__main__.py`, as this process's `__main__`.

    Its errors are raised. The traceback that Python then shows begins in the script.
    """
    importer = pkgutil.get_importer(os.path.abspath(path))
    if importer is not None:  # a folder, or an archive
        _begin(os.path.abspath(path), [path, *arguments])
        spec = importer.find_spec("__main__")
        if spec is None:
            raise SystemExit(
                f"{path} has no `__main__.py`.\n\nHint: `hf-compat run SCRIPT`, or `hf-compat run -m MODULE`."
            )
        _run_found(spec)
        return
    _begin(os.path.dirname(os.path.realpath(path)), [path, *arguments])
    path = os.path.abspath(path)

    def compiled() -> CodeType:
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)

    _execute(_new_main(path, importlib.machinery.SourceFileLoader("__main__", path)), compiled)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or the `__main__` of a package, as this process's `__main__`."""
    _begin(os.getcwd(), ["-m", *arguments])
    _, spec, _ = runpy._get_module_details(name, SystemExit)  # type: ignore[attr-defined]  # as `python -m` finds it
    sys.argv[0] = spec.origin
    _run_found(spec)


def _run_found(spec: ModuleSpec) -> None:
    main = _new_main(spec.origin or spec.name, spec.loader)
    vars(main).update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    _execute(main, lambda: spec.loader.get_code(spec.name))  # type: ignore[union-attr]  # it can run what it finds


def _new_main(file: str, loader: object) -> ModuleType:
    """Replace the command's `__main__` by a new one."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __file__=file, __loader__=loader, __cached__=None, __annotations__={})
    # spawned processes send back objects of the script's classes by the second name
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _begin(folder: str, arguments: list[str]) -> None:
    """Set the command line, and let Python find modules in the script's folder instead of the command's."""
    of_command = ("", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0])))
    sys.argv = arguments
    if sys.flags.safe_path:
        return
    if sys.path and sys.path[0] in of_command:
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _execute(main: ModuleType, read: Callable[[], CodeType]) -> None:
    file = str(main.__file__)
    if not (generation_beside() == "4" or read_launch().process_index > 0):
        from hf_compat.tools.migration.rank_comparisons import PROBLEM, WAY_OUT, comparisons_in_file

        for line, comparison in comparisons_in_file(file):
            warn_once(f"{file}:{line}: `{comparison}`: {PROBLEM}\n\nHint: {WAY_OUT}.")
    try:
        exec(read(), vars(main))
    except BaseException as error:
        from hf_compat.tools.migration.gone_names import account_of

        if (account := account_of(error)) is not None:
            error.add_note(account)
        uncaught, show = error, sys.excepthook

        def show_from_script(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            """Leave out the frames of the command."""
            while value is uncaught and trace is not None and trace.tb_frame.f_code.co_filename != file:
                trace = trace.tb_next
            show(kind, value.with_traceback(trace), trace)

        sys.excepthook = show_from_script
        raise  # Python ends the process with the script's own status
