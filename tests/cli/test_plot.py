"""`hf-compat plot`: curves of runs as a picture and as a page that a browser shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from helpers.toy import Classifier, rows
from hf_compat import Trainer
from hf_compat.cli.main import main
from hf_compat.tools.commands.plot import panels_of, read_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture
def runs(make_args, tmp_path):
    """Two finished runs, and one that was left with a checkpoint only."""
    for name, rate in (("slow", 1e-3), ("fast", 3e-2), ("live", 1e-2)):
        args = make_args(
            output_dir=str(tmp_path / name), learning_rate=rate, num_train_epochs=3, logging_steps=1,
            eval_strategy="epoch", save_strategy="epoch",
        )  # fmt: skip
        trainer = Trainer(
            Classifier(), args, train_dataset=rows(16), eval_dataset=rows(8, seed=1),
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )  # fmt: skip
        trainer.train()
        if name != "live":
            trainer.save_state()
    return tmp_path


def browse(page, *options):
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [
        BROWSER,
        *flags.split(),
        "--disable-component-update",
        "--disable-sync",
        profile,
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_panels_hold_losses_together_and_leave_durations_out(runs):
    run = read_run(str(runs / "slow"))
    assert [title for title, _ in panels_of([run])] == ["loss", "learning_rate", "grad_norm", "eval_accuracy"]
    assert panels_of([run])[0] == ("loss", ["loss", "eval_loss"])
    assert (run.step, run.max_steps, run.name) == (12, 12, "slow") and len(run.curves["loss"]) == 12
    live = read_run(str(runs / "live"))
    assert live.folder.endswith("checkpoint-12") and live.name == "live"


def test_a_picture_of_several_runs(runs, capsys):
    from matplotlib.image import imread

    output = runs / "pictures" / "curves"
    assert main(["plot", *(str(runs / name) for name in ("slow", "fast", "live")), "-o", str(output)]) == 0
    assert "curves.png" in capsys.readouterr().out
    pixels = imread(f"{output}.png")
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000
    blue, orange = (31, 119, 180), (255, 127, 14)
    for colour in (blue, orange):  # each run's curve is there
        close = abs(pixels[..., :3] * 255 - colour).max(-1) < 8
        assert close.sum() > 100


@pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt install chromium)")
def test_the_page_shows_its_curves_in_a_browser(runs):
    output = runs / "curves"
    main(["plot", f"the slow one={runs / 'slow'}", str(runs / "fast"), "-o", str(output), "--kind", "html"])
    page = output.with_suffix(".html")
    text = page.read_text()
    loaded = re.findall(r'(?:src|href)="(?!#)([^"]+)"', text)
    assert loaded == [], "the page holds everything itself"
    # the browser measures what it has drawn: a box of its own for every curve, and none once its run is switched off
    probe = """<script>addEventListener("load", function () {
      var found = {};
      function measure(when) {
        document.querySelectorAll("div.linear g[id^='run-']").forEach(function (line) {
          var box = line.getBoundingClientRect();
          (found[line.id] = found[line.id] || {})[when] = [box.width, box.height];
        });
      }
      measure("on");
      document.querySelector("input[data-run='1']").click();
      measure("off");
      document.body.insertAdjacentHTML("beforeend", "<pre id=found>" + JSON.stringify(found) + "</pre>");
    });</script></body>"""
    probed = runs / "probed.html"
    probed.write_text(text.replace("</body>", probe))
    shown = browse(probed, "--dump-dom")
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL).group(1))
    values = ("loss", "eval-loss", "learning-rate", "grad-norm", "eval-accuracy")
    best = {f"run-{run}-eval-loss-best" for run in (0, 1)}
    assert set(found) == {f"run-{run}-{value}" for run in (0, 1) for value in values} | best
    for name, boxes in found.items():
        least = 3 if name in best else 150
        assert boxes["on"][0] > least, name
        assert (boxes["off"][0] > least) == name.startswith("run-0-"), name
    assert "the slow one" in shown and "12 of 12" in shown
    browse(page, f"--screenshot={runs / 'shot.png'}", "--window-size=1400,1000")
    from matplotlib.image import imread

    pixels = imread(runs / "shot.png")[..., :3]
    blue = abs(pixels * 255 - (31, 119, 180)).max(-1) < 8
    assert blue.sum() > 300


@pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt install chromium)")
def test_a_pointer_shows_values_and_a_switch_the_logarithms(runs):
    output = runs / "curves"
    main(["plot", str(runs / "slow"), str(runs / "fast"), "-o", str(output), "--kind", "html"])
    probe = """<script>addEventListener("load", function () {
      var found = {}, figure = document.querySelector("figure[data-panel=loss]");
      function point(when) {
        var drawing = figure.querySelector("." + document.body.className);
        var curve = drawing.querySelector("g[id='run-0-loss'] path"), box = curve.getBoundingClientRect();
        var right = {clientX: box.right, clientY: box.top, bubbles: true};
        drawing.dispatchEvent(new MouseEvent("mousemove", right));
        found[when] = [...figure.querySelectorAll(".values:not(.hidden)")].map((one) => one.textContent);
        drawing.dispatchEvent(new MouseEvent("mouseleave"));
        found[when + " shown"] = figure.querySelectorAll(".values:not(.hidden)").length;
        found[when + " svg"] = drawing.querySelector("svg").getBoundingClientRect().width;
      }
      point("linear");
      document.querySelector("input[data-scale]").click();
      point("log");
      document.querySelector("input[data-run='1']").click();
      point("one");
      document.body.insertAdjacentHTML("beforeend", "<pre id=found></pre>");
      document.getElementById("found").textContent = JSON.stringify(found);
    });</script></body>"""
    probed = runs / "probed.html"
    probed.write_text(output.with_suffix(".html").read_text().replace("</body>", probe))
    shown = browse(probed, "--dump-dom")
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL).group(1))
    lines = []
    for name in ("slow", "fast"):
        run = read_run(str(runs / name))
        lines += [f"{name}: {value}  {run.curves[value][-1][2]:.6g}  at 12" for value in ("loss", "eval_loss")]
    assert found["linear"] == ["\n".join(lines)] == found["log"], "the last points are at the right end"
    assert found["one"] == ["\n".join(lines[:2])], "a run that is switched off shows nothing"
    assert {found[f"{when} shown"] for when in ("linear", "log", "one")} == {0}
    assert min(found[f"{when} svg"] for when in ("linear", "log", "one")) > 150


def test_the_best_evaluation_is_marked(tmp_path):
    history = [{"step": step, "eval_loss": loss, "eval_f1": loss} for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0))]
    state = {"log_history": history, "global_step": 3, "max_steps": 3}
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps(state))
    assert read_run(str(file)).best == {"eval_loss": (2, 0.0, 1.0)}, "nothing says what was best: the lowest loss"
    del history[0]["eval_loss"]
    file.write_text(json.dumps({**state, "best_metric": 3.0, "best_global_step": 1}))
    assert read_run(str(file)).best == {"eval_f1": (1, 0.0, 3.0)}


def test_what_cannot_be_drawn_is_told(runs, capsys):
    (runs / "empty").mkdir()
    assert main(["plot", str(runs / "empty")]) == 2
    assert "trainer_state.json" in capsys.readouterr().err
    assert main(["plot", str(runs / "nowhere")]) == 2
    assert "no run at" in capsys.readouterr().err
    mine = runs / "mine.png"
    mine.write_bytes(b"a photograph")
    assert main(["plot", str(runs / "slow"), "-o", str(runs / "mine")]) == 2
    assert mine.read_bytes() == b"a photograph" and "choose another `--output`" in capsys.readouterr().err
    assert main(["plot", str(runs / "slow"), "-o", str(runs / "again"), "--kind", "png"]) == 0
    assert main(["plot", str(runs / "slow"), "-o", str(runs / "again"), "--kind", "png", "--by", "epoch"]) == 0


def test_watching_ends_with_the_run(runs):
    assert main(["plot", str(runs / "slow"), "-o", str(runs / "watched"), "--watch", "5"]) == 0
    assert 'http-equiv="refresh"' in (runs / "watched.html").read_text()
