"""Where a script that runs in this process finds its modules."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hf_compat.interop import user_script


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/of/the/command/hf-compat"])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    (tmp_path / "neighbour_of_a_script.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text("import neighbour_of_a_script, sys\nsys.found = sys.path[:]\n")
    yield str(path)
    sys.modules.pop("neighbour_of_a_script", None)
    del sys.found


@pytest.mark.parametrize(
    ("path", "expected"),
    [(["", "/packages"], ["HERE", "/packages"]), (["/of/the/command", "/packages"], ["HERE", "/packages"]),
     (["/first", "/packages"], ["HERE", "/first", "/packages"])],
    ids=["the working folder", "that of the command", "somebody's own"],
)  # fmt: skip
def test_its_folder_takes_the_place_of_the_commands(tmp_path, monkeypatch, script, path, expected):
    monkeypatch.setattr(sys, "path", [*path, *sys.path])
    user_script.run_script(script, [])
    assert sys.found[: len(expected)] == [str(tmp_path) if one == "HERE" else one for one in expected]
    assert sys.argv == [script]


def test_a_package_that_is_imported_on_the_way_sees_the_arguments_of_python_m(tmp_path, monkeypatch, script):
    package = tmp_path / "package_on_the_way"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nsys.found = [sys.argv[:]]\n")
    (package / "inner.py").write_text("import sys\nsys.found.append(sys.argv[:])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "package_on_the_way", raising=False)
    user_script.run_module("package_on_the_way.inner", ["--epochs", "3"])
    monkeypatch.delitem(sys.modules, "package_on_the_way")
    assert sys.found == [["-m", "--epochs", "3"], [str(package / "inner.py"), "--epochs", "3"]]


@pytest.mark.parametrize("shown_error", ["its own", "another", "without a trace"])
def test_the_trace_of_an_error_begins_in_the_script(tmp_path, monkeypatch, shown_error):
    path, shown = tmp_path / "fails.py", []
    path.write_text("def inner():\n    raise KeyError\ninner()\n")
    monkeypatch.setattr(sys, "argv", ["hf-compat"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: shown.append((kind, value, trace)))
    with pytest.raises(KeyError) as caught:
        user_script.run_script(str(path), [])
    error = caught.value
    try:
        raise ValueError
    except ValueError as raised:
        another = raised
    value = another if shown_error == "another" else error
    trace = None if shown_error == "without a trace" else value.__traceback__
    sys.excepthook(type(value), value, trace)
    ((kind, seen, found),) = shown
    assert (kind, seen) == (type(value), value) and seen.__traceback__ is found
    if shown_error == "its own":
        names = [found.tb_frame.f_code.co_name, found.tb_next.tb_frame.f_code.co_name]
        assert names == ["<module>", "inner"] and found.tb_frame.f_code.co_filename == str(path)
    else:
        assert found is trace


@pytest.mark.parametrize(
    ("generation", "rank", "told"), [("5", 0, True), (None, 0, True), ("4", 0, False), ("5", 1, False), ("4", 1, False)]
)
def test_a_comparison_of_ranks_is_told_where_it_no_longer_holds(script, monkeypatch, generation, rank, told):
    said = []
    found = "hf_compat.tools.migration.rank_comparisons.comparisons_in_file"
    monkeypatch.setattr(found, lambda file: [(3, "args.local_rank == -1")] if file == script else [])
    monkeypatch.setattr(user_script, "generation_beside", lambda: generation)
    monkeypatch.setattr(user_script, "read_launch", lambda: SimpleNamespace(process_index=rank))
    monkeypatch.setattr(user_script, "warn_once", said.append)
    monkeypatch.setattr(sys, "path", list(sys.path))
    user_script.run_script(script, [])
    assert len(said) == told and all(text.startswith(f"{script}:3: `args.local_rank == -1`: ") for text in said)
