"""`hf-compat plot`: a damaged or odd state gives a right picture or an error that names file and field."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree

import pytest
from matplotlib.image import imread

from hf_compat.cli.main import main
from hf_compat.tools.commands import plot as plot_module
from hf_compat.tools.commands.plot import panels_of, plot, read_run

BLUE = (31, 119, 180)


def write_state(folder, logs=None, **values):
    folder.mkdir(parents=True, exist_ok=True)
    logs = [{"step": step, "epoch": step / 2, "loss": 1.0 / step} for step in (1, 2, 3)] if logs is None else logs
    state = {"global_step": 3, "max_steps": 3, "log_history": logs, **values}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def blue_pixels(picture):
    return (abs(imread(picture)[..., :3] * 255 - BLUE).max(-1) < 8).sum()


def drawn(tmp_path, *runs, **options):
    """Draw runs, check both files, and return the page."""
    png, page = plot([str(run) for run in runs], str(tmp_path / "curves"), **options)
    assert blue_pixels(png) > 100
    text = page.read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        xml.etree.ElementTree.fromstring(svg)
    return text


NAMES = (r"$\frac{$", "$x", "_hidden", "<b>&", "a\nb\0\ud800", "x" * 10_000, "", "%s {0} {mark}", "eval_$_loss")


def test_any_name_of_a_value(tmp_path):
    logs = [{"step": step, "loss": step, **dict.fromkeys(NAMES, step)} for step in (1, 2)]
    page = drawn(tmp_path, write_state(tmp_path / "one", logs))
    assert "<b>&" not in page and "\0" not in page


def test_any_name_of_a_run(tmp_path):
    run = write_state(tmp_path / "one")
    page = drawn(tmp_path, *(f"{name[:99]}={run}" for name in NAMES), run)
    assert "<b>&" not in page and "\0" not in page


def test_what_is_no_finite_number_is_left_out_and_counted(tmp_path):
    values = [1.0, float("nan"), float("inf"), 10**400, 1e308, None, "0.5", [1], True, 0.5]
    run = write_state(tmp_path / "run", [{"step": i, "loss": value} for i, value in enumerate(values, 1)])
    assert [step for step, _, _ in read_run(str(run)).curves["loss"]] == [1, 2, 3, 4, 5, 9, 10]
    assert "(without 4 not finite)" in drawn(tmp_path, run)


def test_a_panel_without_a_finite_value(tmp_path):
    logs = [{"step": step, "loss": step, "grad_norm": float("nan")} for step in (1, 2)]
    assert "(without 2 not finite)" in drawn(tmp_path, write_state(tmp_path / "run", logs))


@pytest.mark.matrix
def test_many_points_and_many_values(tmp_path, caplog):
    logs = [{"step": step, "loss": step % 7} for step in range(20_000)]
    logs.append({f"value_{number}": number for number in range(200)})
    run = write_state(tmp_path / "run", logs)
    assert len(panels_of([read_run(str(run))])) == 99
    (picture,) = plot([str(run)], str(tmp_path / "curves"), kind="png")
    assert blue_pixels(picture) > 100
    assert "201 values are logged; the first 99 panels are drawn" in caplog.text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"log_history": "x"}, "`log_history` is 'x', not a list of logs"),
        ({"log_history": [[1]]}, "`log_history[0]` is [1], not a log"),
        ({"log_history": [{"step": "x", "loss": 1}]}, "`log_history[0].step` is 'x', not a whole number"),
        ({"log_history": [{"step": -1, "loss": 1}]}, "`log_history[0].step` is -1"),
        ({"log_history": [{"step": float("nan"), "loss": 1}]}, "`log_history[0].step` is nan"),
        ({"log_history": [{"step": 1e300, "loss": 1}]}, "`log_history[0].step` is 1000"),
        ({"log_history": [{"step": True, "loss": 1}]}, "`log_history[0].step` is True"),
        ({"log_history": [{"step": 1, "epoch": "x", "loss": 1}]}, "`log_history[0].epoch` is 'x'"),
        ({"log_history": [{"step": 1, "epoch": float("inf"), "loss": 1}]}, "`log_history[0].epoch` is inf"),
        ({"log_history": [{"loss": 1}], "global_step": "x"}, "`global_step` is 'x'"),
        ({"log_history": [{"loss": 1}], "max_steps": [1]}, "`max_steps` is [1]"),
        ({"log_history": None}, "Nothing is logged"),
        ({"log_history": []}, "Nothing is logged"),
        ({}, "it has no `log_history`"),
        ([1], "it has no `log_history`"),
    ],
)
def test_a_field_that_is_wrong_is_named(state, message, tmp_path, capsys):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state))
    for run in (tmp_path, path):
        assert main(["plot", str(run), "-o", str(tmp_path / "curves")]) == 2
        told = capsys.readouterr().err
        assert message in told and str(tmp_path) in told
    assert sorted(os.listdir(tmp_path)) == ["trainer_state.json"]


@pytest.mark.parametrize("kind", ["cut off", "binary", "deep", "digits", "FIFO", "/dev/zero", "circle", "folder"])
def test_a_state_that_cannot_be_read(kind, tmp_path, capsys):
    path = tmp_path / "trainer_state.json"
    contents = {"cut off": b'{"log_history": [', "binary": b"\xff\xfe", "deep": b"[" * 10**5, "digits": b"9" * 10**4}
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("trainer_state.json" if kind == "circle" else kind)
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "curves")]) == 2
    assert f"{path} cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize("watch", ["-1", "0", "nan", "inf", "1e300"])
def test_no_time_to_watch_by(watch, tmp_path, capsys):
    write_state(tmp_path / "run")
    assert main(["plot", str(tmp_path / "run"), "-o", str(tmp_path / "curves"), f"--watch={watch}"]) == 2
    assert "`--watch` is" in capsys.readouterr().err and os.listdir(tmp_path) == ["run"]


def test_watching_outlives_a_state_that_is_half_written(tmp_path, monkeypatch, caplog):
    run = write_state(tmp_path / "run", global_step=1)
    texts = [
        '{"log_history": [',
        (run / "trainer_state.json").read_text().replace('"global_step": 1', '"global_step": 3'),
    ]
    monkeypatch.setattr(plot_module.time, "sleep", lambda _: (run / "trainer_state.json").write_text(texts.pop(0)))
    assert "3 of 3" in drawn(tmp_path, run, watch=1.0)
    assert "The curves stay as they are" in caplog.text and not texts


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("file/curves", "cannot be written"),
        ("a\0b", "is not a path: embedded null"),
        ("x" * 300, "is too long for a path"),
        ("/proc/curves", "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written(output, reason, tmp_path, capsys):
    write_state(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert main(["plot", str(tmp_path / "run"), "-o", os.path.join(tmp_path, output)]) == 2
    assert reason in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["file", "run"]


@pytest.mark.parametrize("kind", ["FIFO", "folder", "circle"])
def test_what_stands_at_the_place_is_left_alone(kind, tmp_path, capsys):
    write_state(tmp_path / "run")
    target = tmp_path / "curves.png"
    {"FIFO": os.mkfifo, "folder": os.mkdir, "circle": lambda path: path.symlink_to(path.name)}[kind](target)
    before = os.lstat(target).st_mode
    assert main(["plot", str(tmp_path / "run"), "-o", str(tmp_path / "curves")]) == 2
    assert "choose another `--output`" in capsys.readouterr().err and os.lstat(target).st_mode == before


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "There is no run at"),
        ("a\0b", "is not a path: embedded null"),
        ("nowhere", "There is no run at"),
        ("x" * 5000, "is too long for a path"),
    ],
)
def test_no_run(path, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", path]) == 2
    assert reason in capsys.readouterr().err


def test_a_value_of_another_update_than_the_runs_says_so(tmp_path):
    logs = [{"step": 1, "eval_loss": 0.25}, {"step": 3, "loss": 0.5}]
    page = drawn(tmp_path, write_state(tmp_path / "run", logs))
    assert "<td>0.25 <small>at 1</small></td>" in page and "<td>0.5</td>" in page


@pytest.mark.parametrize("last", [{"step": 4, "eval_loss": 0.5}, {"step": 3, "train_runtime": 1.0}, {"step": 3}])
def test_a_finished_run_without_its_last_evaluation_says_so(last, tmp_path):
    logs = [{"step": 2, "eval_loss": 0.25}, {"step": 3, "loss": 0.5}, last]
    page = drawn(tmp_path, write_state(tmp_path / "run", logs, global_step=4, max_steps=4))
    told = "Without what was logged after the last save: run (run). <code>trainer.save_state()</code>"
    assert (told in page) is (last == {"step": 3})
    assert told not in drawn(tmp_path, write_state(tmp_path / "going on", logs, global_step=3, max_steps=4))


def test_values_with_equal_curves_share_a_panel(tmp_path):
    logs = [{"step": s, "lr-a": 1 / s, "lr-b": 1 / s, "lr-c": 2 / s} for s in (1, 2, 3)]
    run = write_state(tmp_path / "run", logs)
    assert [title for title, _ in panels_of([read_run(str(run))])] == ["lr-a, lr-b", "lr-c"]
    page = drawn(tmp_path, run)
    assert 'data-panel="lr-a, lr-b"' in page and all(f"<th>lr-{letter}</th>" in page for letter in "abc")


def test_a_run_shows_behind_one_that_is_equal(tmp_path):
    run = write_state(tmp_path / "run")
    drawn(tmp_path, f"first={run}", f"second={run}")  # it looks for the colour of the first


def test_no_axes_without_a_curve(tmp_path, caplog):
    logs = [{"step": step, "loss": step, "grad_norm": float("nan")} for step in (1, 2)]
    run = write_state(tmp_path / "run", logs)
    assert [title for title, _ in panels_of([read_run(str(run))])] == ["loss"]
    page = drawn(tmp_path, run)
    assert 'data-panel="grad_norm"' not in page and "Not drawn: grad_norm (without 2 not finite)" in page
    assert "Not drawn: grad_norm" in caplog.text


@pytest.mark.parametrize("best", ["out/checkpoint-2", None])
@pytest.mark.parametrize("last", [4, 5])
def test_an_evaluation_of_the_best_model_makes_no_hook(best, last, tmp_path):
    logs = [{"step": step, "eval_loss": value} for step, value in ((2, 0.5), (4, 0.9))]
    logs += [{"step": last, "train_runtime": 1.0}, {"step": last, "eval_loss": 0.5, "eval_other": 0.1}]
    run = read_run(str(write_state(tmp_path / "run", logs, best_model_checkpoint=best)))
    points = [(step, value) for step, _, value in run.curves["eval_loss"]]
    kept = [] if best is not None or last == 4 else [(5, 0.5)]
    assert points == [(2, 0.5), (4, 0.9), *kept] and run.curves["eval_other"]
