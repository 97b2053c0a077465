"""Calls each name that `patch()` replaces, before and under the patch, and prints what came out.

Ours may hand its work to transformers' own object of that name, so every way to do that has a call here.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import random
import sys
from types import SimpleNamespace

import numpy as np
import torch
from transformers import GenerationConfig

import hf_compat
from hf_compat.interop import patching, releases

ROWS = [{"x": [1.0, 2.0], "label": 1}, {"x": [3.0, 4.0], "label": 0}]
FOLDER = sys.argv[1]


class Line(torch.nn.Module):
    """Learns, and generates the tokens that it gets."""

    main_input_name = "x"

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(self.line.weight)
        self.config = SimpleNamespace(pad_token_id=0, is_encoder_decoder=False, to_dict=dict, to_json_string=str)
        self.generation_config = GenerationConfig(max_length=4)

    def forward(self, x, labels=None):
        logits = self.line(x)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}

    def generate(self, x, **keywords):
        return x.long()


def arguments(names, **values):
    kind = names["Seq2SeqTrainingArguments"]
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 2}
    return kind(f"{FOLDER}/out", **quiet, **values)


def trained(names, trainer="Trainer", **values):
    made = names[trainer](Line(), arguments(names, **values), train_dataset=ROWS, eval_dataset=ROWS)
    with contextlib.redirect_stdout(sys.stderr):
        return made, made.train()


def numbers(names):
    trainer, result = trained(names, skip_memory_metrics=False)
    trainer.create_model_card()
    memory = sorted(name for name in result.metrics if "mem" in name)
    return result.training_loss, memory, os.path.isfile(f"{FOLDER}/out/README.md")


def generated(names):
    trainer, _ = trained(
        names, "Seq2SeqTrainer", predict_with_generate=True, generation_config=GenerationConfig(max_length=3)
    )
    return trainer.predict(ROWS).predictions, trainer.model.generation_config.max_length


def optimizers(names):
    parameter = torch.nn.Parameter(torch.ones(2))
    return {parameter: torch.optim.SGD([parameter], lr=0.1)}


# Options without which a schedule is refused
NEEDED = {
    "warmup_stable_decay": {"num_decay_steps": 2},
    "cosine_with_min_lr": {"min_lr": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 0.1},
}


def rates(names, kind):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    schedule = names["get_scheduler"](kind, optimizer, 1, 4, scheduler_specific_kwargs=NEEDED.get(kind))
    found = []
    for step in range(3):
        optimizer.step()
        schedule.step(*([1.0 - step] if kind in ("greedy", "reduce_lr_on_plateau") else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


def smoothed(names):
    output = {"logits": torch.arange(12.0).reshape(1, 3, 4)}
    labels = torch.tensor([[1, 2, -100]])
    one = names["LabelSmoother"](epsilon=0.1)
    return float(one(output, labels)), float(one(output, labels, shift_labels=True))


def seeded(names, name, *values):
    names[name](*values)
    found = random.random(), float(np.random.rand()), float(torch.rand(1))
    torch.use_deterministic_algorithms(False)
    return found


def parsed(names):
    parser = names["HfArgumentParser"](names["TrainingArguments"])
    (found,) = parser.parse_args_into_dataclasses([f"--output_dir={FOLDER}", "--use_cpu", "true"])
    (other,) = parser.parse_dict({"output_dir": FOLDER, "learning_rate": 0.5})
    return found.use_cpu, other.learning_rate, isinstance(parser, argparse.ArgumentParser)


def last(names):
    os.makedirs(f"{FOLDER}/none", exist_ok=True)
    return names["get_last_checkpoint"](f"{FOLDER}/none")


def handled(names):
    callback = names["EarlyStoppingCallback"](2)
    handler = names["CallbackHandler"]([names["DefaultFlowCallback"], callback], Line(), None, None, None)
    handler.remove_callback(names["DefaultFlowCallback"])
    return handler.callback_list


def trial():
    return SimpleNamespace(
        suggest_float=lambda *given, **options: [*given, options], suggest_int=lambda *given: given,
        suggest_categorical=lambda name, given: given,
    )  # fmt: skip


def made(*values, **keywords):
    """Make an object of the class, and read what transformers' own has in it."""
    return lambda names, name: vars(names[name](*values, **keywords))


def members(names, name):
    return sorted((one.name, one.value) for one in names[name])


def fields(count):
    return lambda names, name: [*names[name](*range(count))]


def collated(names, name):
    arrays = [{"x": np.ones(2), "label_ids": [1, 2]}]
    collate = names[name]
    return [collate(rows, kind) for rows in (ROWS, arrays) for kind in ("pt", "np")] + [
        sys.modules["transformers"].DefaultDataCollator(return_tensors=kind)(ROWS) for kind in ("pt", "np")
    ]


def tracker(names, name):
    """Each raises an error without its package."""
    assert issubclass(names[name], names["TrainerCallback"])
    try:
        return type(names[name]()).__name__
    except (ImportError, RuntimeError, ValueError) as error:
        return f"{name}: {type(error).__name__}"


CALLS = {
    "Trainer": lambda names, name: numbers(names),
    "Seq2SeqTrainer": lambda names, name: generated(names),
    "TrainingArguments": lambda names, name: names[name](FOLDER, use_cpu=True).learning_rate,
    "Seq2SeqTrainingArguments": lambda names, name: arguments(names, generation_num_beams=2).generation_num_beams,
    "CallbackHandler": lambda names, name: handled(names),
    "TrainerCallback": made(),
    "DefaultFlowCallback": made(),
    "ProgressCallback": lambda names, name: names[name]().max_str_len,
    "PrinterCallback": made(),
    "EarlyStoppingCallback": lambda names, name: names[name](3).state(),
    "ExportableState": lambda names, name: callable(names[name]().state),
    "TrainerState": lambda names, name: names[name](global_step=3, max_steps=4).global_step,
    "TrainerControl": lambda names, name: names[name](should_log=True).state()["args"]["should_log"],
    "EvalPrediction": lambda names, name: [*names[name](predictions=np.ones(2), label_ids=np.zeros(2))],
    "EvalLoopOutput": fields(4),
    "PredictionOutput": fields(3),
    "TrainOutput": fields(3),
    "BestRun": fields(3),
    "speed_metrics": lambda names, name: sorted(names[name]("train", 0.0, num_samples=4, num_steps=2)),
    "default_data_collator": collated,
    "get_last_checkpoint": lambda names, name: last(names),
    "set_seed": lambda names, name: seeded(names, name, 3),
    "enable_full_determinism": lambda names, name: seeded(names, name, 3),
    "seed_worker": lambda names, name: seeded(names, name, 0, 1, 0)[2],
    "get_scheduler": lambda names, name: {one.value: rates(names, one.value) for one in names["SchedulerType"]},
    "HfArgumentParser": lambda names, name: parsed(names),
    "AcceleratorConfig": made(split_batches=True),
    "metrics_format": lambda names, name: names[name]({"train_loss": 0.12345, "total_flos": 2e12, "epoch": 1.0}),
    "LabelSmoother": lambda names, name: smoothed(names),
    "LayerWiseDummyOptimizer": lambda names, name: names[name](optimizers(names)).step(),
    "LayerWiseDummyScheduler": lambda names, name: names[name](optimizer_dict=optimizers(names), lr=0.1).default_lr,
    "denumpify_detensorize": lambda names, name: names[name]({"a": np.float64(1), "b": (torch.tensor(2),)}),
    "default_compute_objective": lambda names, name: names[name]({"eval_loss": 1.0, "eval_a": 2.0, "epoch": 3}),
    "default_hp_space_optuna": lambda names, name: names[name](trial()),
    **dict.fromkeys(
        ("IntervalStrategy", "SaveStrategy", "SchedulerType", "HubStrategy", "HPSearchBackend", "OptimizerNames",
         "ParallelMode"), members,
    ),
    **dict.fromkeys(
        ("TensorBoardCallback", "WandbCallback", "TrackioCallback", "CometCallback", "AzureMLCallback",
         "MLflowCallback", "DagsHubCallback", "NeptuneCallback", "CodeCarbonCallback", "ClearMLCallback",
         "FlyteCallback", "DVCLiveCallback", "SwanLabCallback", "KubeflowCallback", "JITCheckpointCallback"), tracker,
    ),
}  # fmt: skip


def plain(value):
    """A form that can be compared and printed."""
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return [type(value).__name__, value.tolist()]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.value if isinstance(value, enum.Enum) else value


def outcomes(names):
    found = {}
    for name, call in CALLS.items():
        torch.manual_seed(1)
        try:
            found[name] = plain(call(names, name))
        except Exception as error:
            found[name] = {"error": type(error).__name__}
    return found


def held_by_transformers():
    """Look the names up where transformers holds them."""
    homes = releases.modules_there(patching.HOMES)
    return {name: next(vars(home)[name] for home in homes if name in vars(home)) for name in CALLS}


before = outcomes(held_by_transformers())
hf_compat.patch()
replaced = sorted(releases.REPLACED)
print("FOUND" + json.dumps({"before": before, "under": outcomes(held_by_transformers()), "replaced": replaced}))
