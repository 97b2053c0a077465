"""What two records say of each other: equal, first difference, explained, cut short. Records written by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from hf_compat.checkpoint.reading import is_ours_alone
from hf_compat.tools.comparison.compared import SideReport, judge, limits_up_to, repeats
from hf_compat.tools.comparison.reading import End, read_records
from hf_compat.tools.comparison.report import as_json, as_parts
from hf_compat.tools.comparison.running import Limits, Side
from hf_compat.tools.comparison.verdicts import files_under, first_difference, verdict_on_files


def text_of(found) -> str:
    return "\n".join(map(str, as_parts(found, Limits())))


def lines_of(updates=3, end="finished", **changed):
    """Return a run's lines; `changed` maps `kind_update` to fields of that line."""
    lines = [{"kind": "train", "training": 1, "trainer": "Trainer"}]
    for update in range(1, updates + 1):
        at = {"training": 1, "within": True, "update": update}
        made = {
            "loss": {"micro_batch": 0, "value": 1.0 / update},
            "update": {"rates": [0.1], "gradients": 2.0, "bits": f"b{update}", "norm": 3.0, "seconds": 0.5},
            "event": {"event": "on_step_end", "epoch": update / 3, "flags": "00000"},
            "log": {"values": {"loss": 1.0 / update, "eval_runtime": 0.1 * len(changed)}},
        }
        lines += [
            {"kind": kind, **at, **values, **changed.get(f"{kind}_{update}", {})} for kind, values in made.items()
        ]
    if end == "finished":
        at = {"training": 1, "update": updates}
        lines.append({"kind": "trained", **at, "metrics": {"train_loss": 0.5}})
    return [*lines, {"kind": "end", "how": end, "status": int(end == "error")}]


def report_of(folder, name, lines):
    record = folder / name / "record"
    record.mkdir(parents=True)
    (record / "record-0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "lo')
    found = read_records(record)
    side = Side(name=name, python="python", transformers="5.23.0")
    return SideReport(side=side, folder=folder / name, end=found.end or End("killed"), found=found, last_lines=())


@pytest.fixture
def judged(tmp_path):
    numbers = itertools.count()

    def judge_lines(theirs, ours):
        folder = tmp_path / f"{next(numbers)}"
        return judge(report_of(folder, "transformers", theirs), report_of(folder, "hf_compat", ours))

    return judge_lines


def test_equal_records_are_equal_but_for_times(judged):
    found = judged(lines_of(), lines_of(update_1={"seconds": 0.25}))
    assert found.status == 0 and found.first is None
    assert sum(verdict.compared for verdict in found.verdicts) == 3 * 6 + 1
    assert "Equal, bit for bit." in text_of(found)


@pytest.mark.parametrize(
    ("changed", "quantity", "update", "size"),
    [
        ({"loss_2": {"value": 0.5 + 2**-40}, "log_2": {"values": {"loss": 7.0}}}, "micro-batch losses", 2, 2**-40),
        ({"update_3": {"rates": [0.1 + 2**-20]}}, "learning rates", 3, pytest.approx(2**-20)),
        ({"update_2": {"bits": "other"}}, "weights after updates", 2, 0.0),
        ({"update_2": {"gradients": float("nan")}}, "gradient norms", 2, None),
        ({"event_1": {"event": "on_save"}}, "callback events", 1, None),
        ({"log_3": {"values": {"loss": 1.0 / 3, "more": 1}}}, "log history", 3, None),
    ],
)
def test_the_first_difference_is_named(changed, quantity, update, size, judged):
    found = judged(lines_of(), lines_of(**changed))
    assert found.status == 1
    assert (found.first.quantity, found.first.update) == (quantity, update)
    assert found.first.size == size or (
        size is None and (found.first.size is None or found.first.size != found.first.size)
    )
    told = json.loads(as_json(found, Limits()))
    assert told["first_difference"]["quantity"] == quantity and told["status"] == 1
    assert f"first difference: update {update}, {quantity}" in text_of(found)


def test_nan_equals_nan_and_zero_has_a_sign(judged):
    nan = {"loss_2": {"value": float("nan")}}
    assert judged(lines_of(**nan), lines_of(**nan)).status == 0


def test_signs_of_zero_differ(judged):
    found = judged(lines_of(loss_2={"value": 0.0}), lines_of(loss_2={"value": -0.0}))
    assert found.first.quantity == "micro-batch losses" and found.first.update == 2


def test_a_side_that_fails_is_compared_until_then(judged):
    found = judged(lines_of(3), [*lines_of(2, end="error")])
    assert found.status == 1 and found.first is None
    assert all(verdict.is_equal for verdict in found.verdicts)
    assert found.complaints == ("hf_compat: the script failed, after 2 updates.\n",)


def test_both_sides_that_fail_alike_are_not_compared_to_the_end(judged):
    found = judged(lines_of(2, end="error"), lines_of(2, end="error"))
    assert found.status == 2 and "On both sides, the script failed, after 2 updates" in found.complaints[0]
    assert "Not compared to the end. What is above was compared until then." in "\n".join(
        map(str, as_parts(found, Limits()))
    )


def test_what_a_resumed_run_reports_is_explained(judged):
    def resumed(loss):
        return [line for line in lines_of(5, log_3={"values": {"loss": loss}}) if line.get("update", 9) > 2]

    found = judged(resumed(0.25), resumed(0.75))
    (logs,) = [verdict for verdict in found.verdicts if verdict.quantity == "log history"]
    assert found.status == 0 and "The loss that a resumed run reports" in logs.explained[0]


def test_the_end_of_a_resumed_epoch_is_explained(judged):
    def resumed(*events):
        at = {"training": 1, "within": True, "update": 2, "epoch": 1.0, "flags": "00000"}
        begin = [{"kind": "event", "event": name, **at} for name in ("on_train_begin", "on_epoch_begin", *events)]
        log = [{"kind": "log", **at, "values": {"eval_loss": 7.0}}] if events else []
        lines = [line for line in lines_of(5) if line.get("update", 9) > 2]
        later = [{"kind": "log", **at, "update": 5, "values": {"eval_loss": 6.0}}]
        return [*begin[:3], *log, *begin[3:], *lines[:-2], *later, *lines[-2:]]

    found = judged(resumed(), resumed("on_epoch_end", "on_log", "on_epoch_begin"))
    assert found.status == 0, text_of(found)
    told = [verdict.explained for verdict in found.verdicts if verdict.explained]
    assert len(told) == 2 and all("ends the epoch that it resumed here only" in reasons[0] for reasons in told)
    changed = judged(resumed("on_epoch_end", "on_epoch_begin"), resumed())
    assert changed.status == 1  # only ours is documented


def test_the_same_loss_of_a_run_from_its_beginning_is_a_difference(judged):
    assert judged(lines_of(), lines_of(log_1={"values": {"loss": 0.75}})).status == 1


def test_status_of_the_script_counts(judged):
    found = judged(lines_of(), [*lines_of()[:-1], {"kind": "end", "how": "exit", "status": 3, "account": ""}])
    assert found.status == 1 and "status 0 under transformers, 3 here" in found.complaints[0]


def write(folder: Path, files: dict) -> dict:
    for name, content in files.items():
        path = folder / "output" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            torch.save(content, path)
    return files_under(folder / "output")


def test_files_are_compared_by_what_they_hold(tmp_path):
    state = {"global_step": 4, "train_runtime": 1.5, "log_history": [1]}
    common = {"config.json": "{}", "checkpoint-4/optimizer.pt": {"state": {0: torch.ones(3)}}}
    theirs = write(tmp_path / "a", {**common, "checkpoint-4/trainer_state.json": json.dumps(state)})
    own = {"checkpoint-4/manifest.json": "{}", "checkpoint-4/run_state.pt": {}}
    state |= {"train_runtime": 2.5, "log_history": [], "nonfinite_steps": 3}  # compared with the logs
    ours = write(tmp_path / "b", {**common, **own, "checkpoint-4/trainer_state.json": json.dumps(state)})
    found = verdict_on_files(theirs, ours, 4, other_release=False)
    assert found.is_equal and found.compared == 3 and len(found.explained) == 2


@pytest.mark.parametrize(
    ("theirs", "ours", "differs"),
    [
        ('{"loss": 1, "elapsed_time": "0:01"}\n', '{"loss": 1, "elapsed_time": "0:02"}\n', ""),
        ('{"a": 1}\n\n{"train_runtime": 3}\n', '{"a": 1}\n{"train_runtime": 4}\n', ""),
        ('{"a": 1}\n{"a": 2}\n', '{"a": 1}\n{"a": 3}\n', "[1]['a']"),
        ('{"a": 1}\n', '{"a": 1}\n{"a": 2}\n', "[1]"),
        ("text\n", "other\n", ""),
    ],
)
def test_a_log_of_the_scripts_own_is_compared_line_by_line(theirs, ours, differs, tmp_path):
    sides = [write(tmp_path / name, {"log.jsonl": text}) for name, text in (("a", theirs), ("b", ours))]
    found = verdict_on_files(*sides, 4, other_release=False)
    is_equal = "elapsed" in theirs or "runtime" in theirs
    assert found.is_equal is is_equal and (is_equal or found.first.name == f"output/log.jsonl{differs}")


def test_a_file_that_differs_is_named_with_its_place(tmp_path):
    changed = torch.ones(3)
    changed[1] = 1 + 2**-20
    theirs = write(tmp_path / "a", {"optimizer.pt": {"state": {0: torch.ones(3)}}, "only.txt": "theirs"})
    ours = write(tmp_path / "b", {"optimizer.pt": {"state": {0: changed}}, "manifest.txt": "ours"})
    found = verdict_on_files(theirs, ours, 4, other_release=False)
    assert found.differing == 3 and found.largest == 2**-20 and not found.explained
    assert "output/only.txt" in {found.first.name, "output/only.txt"} and found.first.name == "output/manifest.txt"
    where = first_difference({"a": [torch.ones(3)]}, {"a": [changed]})
    assert where == ("['a'][0][1]", 1.0, 1 + 2**-20)


def test_a_difference_that_transformers_has_with_itself_is_told_from_one_of_the_engines(judged, tmp_path):
    found = judged(lines_of(), lines_of(loss_2={"value": 0.25}))
    once = found.theirs.found
    alike = report_of(tmp_path / "1", "again", lines_of(2, event_2={"flags": "10000"})).found
    assert repeats(found.first, once, alike)
    other = report_of(tmp_path / "2", "again", lines_of(2, loss_1={"value": 0.75})).found
    assert not repeats(found.first, once, other)
    later = report_of(tmp_path / "3", "again", lines_of(3, loss_3={"value": 0.75})).found
    assert repeats(found.first, once, later)
    assert [limits_up_to(found.first, Limits(max_steps=n)).max_steps for n in (2, 3, 20, 0)] == [2, 3, 3, 3]


def test_files_that_only_this_package_writes():
    names = ("manifest.json", "run_state.pt", "run_state_0.pt", "run_state_127.pt", "rng_state_0.pth", "optimizer.pt")
    assert [name for name in names if is_ours_alone(f"out/checkpoint-4/{name}")] == list(names[:4])
