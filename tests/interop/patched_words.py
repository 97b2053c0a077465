"""A patched process that listens on transformers' loggers, as scripts and their tests do; it prints what it heard."""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import hf_compat

hf_compat.patch()

import torch
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.testing_utils import CaptureLogger
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.utils import logging

from helpers.toy import Classifier, rows


class Own(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs): ...


def trainer(callbacks=(), **values):
    base = {"per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2, "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(sys.argv[1], **{**base, **values})
    return Trainer(Classifier(), args, train_dataset=rows(8), eval_dataset=rows(8), callbacks=list(callbacks))


heard: dict[str, object] = {}


def warned(module, act):
    with patch(f"{module}.logger.warning") as warning:
        act()
    return [call.args[0] for call in warning.call_args_list]


torch.manual_seed(0)
heard["duplicate"] = warned("transformers.trainer_callback", lambda: trainer([Own, Own]))
heard["ordinary"] = warned("transformers.trainer_callback", lambda: trainer([Own]))
heard["no flow"] = warned(
    "transformers.trainer_callback", lambda: CallbackHandler([ProgressCallback()], None, None, None, None)
)
evaluating = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
heard["early stopping"] = warned(
    "transformers.trainer_callback", lambda: trainer([EarlyStoppingCallback()], **evaluating).train()
)
alone = trainer(restore_callback_states_from_checkpoint=True)
folder = f"{sys.argv[1]}/checkpoint-2"
heard["absent"] = warned("transformers.trainer", lambda: alone.train(resume_from_checkpoint=folder))
with CaptureLogger(logging.get_logger()) as captured:
    trainer(save_steps=1, logging_steps=3, per_device_train_batch_size=2).train(resume_from_checkpoint=folder)
heard["differs"] = captured.out.splitlines()
with CaptureLogger(logging.get_logger()) as captured:
    trainer(log_level="info").train()
heard["info"] = captured.out.splitlines()
given = trainer(enable_jit_checkpoint=True)
found = [one for one in given.callback_handler.callbacks if isinstance(one, JITCheckpointCallback)]
heard["jit"] = [len(found), found[0].trainer is given, found[0].jit_manager.is_checkpoint_requested]
hf_compat.unpatch()
heard["unpatched"] = warned("transformers.trainer_callback", lambda: hf_compat.Trainer(
    Classifier(), hf_compat.TrainingArguments(sys.argv[1]), callbacks=[Own, Own]
))  # fmt: skip
print("HEARD" + json.dumps(heard))
