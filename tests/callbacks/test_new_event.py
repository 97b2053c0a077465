"""An event is one row: its method in `hf/callbacks.py`. A copy of the package gets one more event."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_compat

ROW = '''
    @event("on_after_backward", clears=("should_save",), offers=("seconds",))
    def on_backward_end(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> Answer:
        """After a backward pass."""
'''
SCRIPT = """
import sys
import lightning.pytorch as pl
import transformers
from helpers.toy import Classifier, rows
from helpers.handwritten import HandWritten, bare_trainer, loaders
import hf_compat

folder, fired = sys.argv[1], []

class Listens(hf_compat.TrainerCallback):
    def on_backward_end(self, args, state, control, seconds=None, **kwargs):
        fired.append(control.should_save if seconds is None else seconds)
    def on_epoch_begin(self, args, state, control, trainer=None, **kwargs):
        if isinstance(trainer, hf_compat.Trainer):
            bridges = [one for one in trainer.lightning_trainer.callbacks if type(one).__name__ == "HFBridge"]
            bridges[0].fire("on_backward_end", seconds=0.5)

class Hears(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        fired.append("lightning")

def trained(kind, arguments, *callbacks):
    fired.clear()
    args = arguments(folder, per_device_train_batch_size=4, max_steps=3, use_cpu=True, report_to="none",
                     save_strategy="no", disable_tqdm=True)
    kind(Classifier(), args, train_dataset=rows(16), callbacks=list(callbacks)).train()
    return list(fired)

transformers.TrainerCallback.on_backward_end = lambda self, *args, **kwargs: None  # as a newer release has it

class Theirs(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.callback_handler.call_event("on_backward_end", self.args, self.state, self.control)
        return loss

ours = hf_compat.Trainer, hf_compat.TrainingArguments
assert trained(*ours, Listens()) == [0.5, *[False] * 3]
assert trained(*ours, Hears(), Listens()) == [0.5, *["lightning", False] * 3], "in the order of the list"
assert trained(Theirs, transformers.TrainingArguments, hf_compat.LightningCallbackAdapter(Hears())) == ["lightning"] * 3
fired.clear()
bare_trainer([hf_compat.HFCallbackAdapter(Listens())], folder, max_steps=3, accumulate_grad_batches=1).fit(
    HandWritten(Classifier(), updates=3), loaders()[0])
assert fired == [False] * 3
"""


@pytest.mark.matrix
@pytest.mark.real_python
def test_a_row_is_all_that_a_new_event_takes(tmp_path):
    package, tests = Path(hf_compat.__file__).parent, Path(__file__).parents[1]
    copy = shutil.copytree(package, tmp_path / "hf_compat", ignore=shutil.ignore_patterns("__pycache__"))
    rows = copy / "hf" / "callbacks.py"
    before = "    @event()\n    def on_push_begin("
    text = rows.read_text()
    assert before in text
    rows.write_text(text.replace(before, ROW.lstrip("\n") + "\n" + before))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(tests)])}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out")], env=environment, capture_output=True, text=True,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
