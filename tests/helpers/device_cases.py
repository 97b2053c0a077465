"""Configurations that only a device has, in the form of `tests/helpers/parity/cases.py`."""

from __future__ import annotations

import torch

from helpers import toy
from helpers.parity.cases import BASE, BERT, CASES, EVAL, LM, METRICS, SAVE, TAGS, evaluate_and_predict
from helpers.parity.model_cases import lora
from hf_compat.optim.optimizers import OPTIMIZERS
from sweeps.parity.optimizer_runs import STEPS_AS_TORCH, settings_of

DEVICE_CASES: dict[str, dict] = {}
_WITHOUT_THAT_OPERATOR = ("marian_beams", "without_generation", "loss_only", "config_object", "config_and_length")
# By kind of device and configuration: why it is not compared.
NOT_COMPARED: dict[str, dict[str, str]] = {
    "mps": {
        "tf32": "both trainers refuse it on Apple's GPU",
        **dict.fromkeys(
            ("resume_within_an_epoch", "resume_at_an_epoch_end", "resume_early_stopping"),
            "transformers does not restore what Apple's GPU draws (docs/differences.md, Other accelerators)",
        ),
        **dict.fromkeys(
            (name for name in CASES if name.startswith("seq2seq") and not name.endswith(_WITHOUT_THAT_OPERATOR)),
            "generation calls an operator that only a build of torch with MPS has",
        ),
    }
}


def case(name: str, args: dict | None = None, **parts) -> None:
    assert name not in DEVICE_CASES and name not in CASES, name
    DEVICE_CASES[name] = {**BASE, **parts, "args": {**BASE["args"], **(args or {})}}


class Overflowing(torch.nn.Module):
    """A classifier whose scaled gradients are no numbers of float16 until the scale has come down."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.outer = toy.Classifier(), torch.nn.Linear(3, 3)

    def forward(self, x, labels=None):
        logits = self.outer(self.body(x)["logits"] * 64) / 64
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits.float() * 8, labels), "logits": logits}


def _scale(trainer) -> list:
    scaler = trainer.accelerator.scaler
    return [scaler.get_scale(), trainer.lr_scheduler.last_epoch, trainer.state.global_step]


def _scale_and_resume(trainer) -> list:
    first = _scale(trainer)
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-4")
    return [first, _scale(trainer)]


def _callback_steps(api):
    """A step of the wrapper's scales, as the update's own does. One of the optimizer inside does not."""

    class Steps(api.TrainerCallback):
        def on_substep_end(self, args, state, control, optimizer, **kwargs):
            optimizer.step()
            optimizer.zero_grad()

        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            if state.global_step % 2:
                optimizer.step()
            elif state.global_step > 4:
                optimizer.optimizer.step()

    return {"callbacks": [Steps()]}


FP16 = {"fp16": True, "logging_steps": 1, "warmup_steps": 3}
for _optim in ("adamw_torch_fused", "adamw_torch", "sgd", "adafactor"):
    case(f"fp16_overflow_{_optim}", {**FP16, "optim": _optim}, model=Overflowing, after=_scale)
case("fp16_overflow_accumulated", {**FP16, "gradient_accumulation_steps": 3}, model=Overflowing, after=_scale)
case(
    "fp16_overflow_not_clipped", {**FP16, "optim": "adamw_torch", "max_grad_norm": 0.0}, model=Overflowing, after=_scale
)
case("fp16_overflow_resumed", {**FP16, **SAVE, **EVAL}, model=Overflowing, after=_scale_and_resume)
case(
    "fp16_callback_steps", {**FP16, "gradient_accumulation_steps": 2}, model=Overflowing, extra=_callback_steps,
    after=_scale,
)  # fmt: skip
case("fp16", {**FP16, **EVAL, "gradient_accumulation_steps": 2}, **LM)
case(
    "fp16_bert",
    {**FP16, **EVAL},
    **BERT,
    extra=lambda api: METRICS,
    after=lambda t: list(t.predict(toy.labelled_blocks(9))),
)


def _precisions(trainer) -> list[str]:
    return [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]


case("tf32", {"tf32": True, **EVAL}, after=_precisions)
case("no_tf32", {"tf32": False}, after=_precisions)
case(
    "cpu_beside_a_device", {"use_cpu": True, **EVAL, **SAVE}, after=evaluate_and_predict, device_args={"use_cpu": True}
)
case("cpu_in_bf16_beside_a_device", {"bf16": True}, device_args={"use_cpu": True})
case("async_copies", {"accelerator_config": {"non_blocking": True}, **EVAL}, **TAGS)
case("async_copies_by_workers", {"accelerator_config": {"non_blocking": True}, "dataloader_num_workers": 1, **EVAL})
case("not_pinned", {"dataloader_pin_memory": False, **EVAL})
case("lora", {**EVAL, **SAVE}, **{**LM, "model": lora})
case("memory", {"skip_memory_metrics": False, **EVAL}, device_args={"skip_memory_metrics": True})
case("dropout_resumed", {**SAVE, "gradient_checkpointing": True, "num_train_epochs": 3}, **LM)
case(
    "reentrant_checkpointing",
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    **LM,
)
for _name in STEPS_AS_TORCH:
    if (
        OPTIMIZERS[_name].path.startswith(("torch.", "torch_", "transformers."))
        and not _name.endswith(("xla", "npu_fused"))
        and f"optim_{_name}" not in CASES
    ):
        case(f"optim_{_name}", {"optim": _name, **settings_of(_name), **SAVE})
