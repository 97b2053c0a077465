"""PEFT, datasets and evaluate with transformers' own Trainer, and a subclass in the shape of optimum's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import peft
import torch
from transformers import Trainer, TrainingArguments

from sweeps.libraries import toys

TRAIN, EVAL = 60, 12


def tokens(models: Path, rows, keep_labels=False):
    """Tokenize texts for a language model, or for a classifier with the labels that there are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "llama")

    def convert(row):
        found = tokenizer(row["text"], truncation=True, max_length=32)
        return found if keep_labels else {**found, "labels": list(found["input_ids"])}

    return tokenizer, rows.map(convert, remove_columns=["text"], load_from_cache_file=False)


def language_trainer(
    models: Path, args: dict, change=lambda model: model, trainer_class=None, arguments=None, **options
):
    from transformers import DataCollatorForSeq2Seq, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer, rows = tokens(models, toys.texts(TRAIN + EVAL))
    torch.manual_seed(0)
    return (trainer_class or Trainer)(
        model=change(LlamaForCausalLM.from_pretrained(models / "llama")),
        args=(arguments or TrainingArguments)(**args),
        train_dataset=rows.select(range(TRAIN)),
        eval_dataset=rows.select(range(TRAIN, TRAIN + EVAL)),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        **options,
    )


def adapted(model, kind: str, **options):
    return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))


def two_adapters(model):
    model = adapted(model, "LoraConfig", r=4, target_modules=["q_proj", "v_proj"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    return model


def streamed(models: Path, args: dict, buffer: int = 0):
    """Train on a streamed data set of `datasets`, as it is or shuffled by its buffer."""
    from transformers import DataCollatorForSeq2Seq, LlamaForCausalLM

    tokenizer, rows = tokens(models, toys.texts(TRAIN + EVAL))
    stream = rows.select(range(TRAIN)).to_iterable_dataset(num_shards=4)
    torch.manual_seed(0)
    return Trainer(
        model=LlamaForCausalLM.from_pretrained(models / "llama"),
        args=TrainingArguments(**args),
        train_dataset=stream.shuffle(seed=1, buffer_size=buffer) if buffer else stream,
        eval_dataset=rows.select(range(TRAIN, TRAIN + EVAL)),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


METRIC = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float(sum(p == r for p, r in zip(predictions, references))) / len(references)}
"""


def evaluated(models: Path, args: dict):
    """Classify, with a metric of `evaluate` and the best model at the end."""
    import evaluate
    from transformers import DataCollatorWithPadding

    script = Path(args["output_dir"]) / "accuracy.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(METRIC)
    os.environ["HF_EVALUATE_OFFLINE"] = "1"
    metric = evaluate.load(str(script), cache_dir=str(script.parent / "cache"))
    rows = toys.judged(TRAIN + EVAL).map(
        lambda row: {"text": row["prompt"] + row["completion"], "labels": int(row["label"])}
    )
    tokenizer, rows = tokens(models, rows.select_columns(["text", "labels"]), keep_labels=True)

    def accuracy(found):
        return metric.compute(predictions=found.predictions.argmax(-1), references=found.label_ids)

    torch.manual_seed(0)
    args = {**args, "eval_steps": 5, "metric_for_best_model": "accuracy", "load_best_model_at_end": True}
    return Trainer(
        model=toys.llama(labels=2),
        args=TrainingArguments(**args),
        train_dataset=rows.select(range(TRAIN)),
        eval_dataset=rows.select(range(TRAIN, TRAIN + EVAL)),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )


@dataclass
class DistillingArguments(TrainingArguments):
    distillation_weight: float = 0.5
    distillation_temperature: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.distillation_weight <= 1:
            raise ValueError("distillation_weight must lie between 0 and 1")


class DistillingTrainer(Trainer):
    def __init__(self, model=None, args=None, teacher=None, **kwargs):
        super().__init__(model, args, **kwargs)
        self.teacher = self.accelerator.prepare_model(teacher, evaluation_mode=True).eval()
        self._parts = {"task_loss": 0.0, "distillation_loss": 0.0, "count": 0}
        self._set_signature_columns_if_needed()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if not self.model.training:
            return (loss, outputs) if return_outputs else loss
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        heat = self.args.distillation_temperature
        distance = torch.nn.functional.kl_div(
            (outputs.logits / heat).log_softmax(-1), (wanted / heat).softmax(-1), reduction="batchmean"
        )
        distance = distance / self.current_gradient_accumulation_steps
        self._parts["task_loss"] += loss.item()
        self._parts["distillation_loss"] += distance.item()
        self._parts["count"] += 1
        weight = self.args.distillation_weight
        loss = (1 - weight) * loss + weight * distance
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        count = self._parts.pop("count")
        if count and "loss" in logs:
            logs |= {name: value / count for name, value in self._parts.items()}
        self._parts = {"task_loss": 0.0, "distillation_loss": 0.0, "count": 0 if "loss" in logs else count}
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        decayed = self.get_decay_parameter_names(self.model)
        groups = [
            {
                "params": [p for n, p in self.model.named_parameters() if (n in decayed) == decays],
                "weight_decay": 0.1 * decays,
            }
            for decays in (True, False)
        ]
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = kind(groups, **options)
        return self.optimizer

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        (Path(output_dir or self.args.output_dir) / "distillation.txt").write_text(str(self.args.distillation_weight))


def distilled(models: Path, args: dict):
    """Make a Trainer in optimum's shape: arguments of its own, a teacher, its own saving and its own optimizer."""
    classes = {"trainer_class": DistillingTrainer, "arguments": DistillingArguments}
    return language_trainer(models, args, teacher=toys.llama(), **classes)


PEFT = {
    "peft-lora": (
        "Trainer",
        "LoRA",
        partial(language_trainer, change=partial(adapted, kind="LoraConfig", r=4, lora_dropout=0.1)),
    ),
    "peft-dora": (
        "Trainer",
        "DoRA",
        partial(language_trainer, change=partial(adapted, kind="LoraConfig", r=4, use_dora=True)),
    ),
    "peft-head": (
        "Trainer",
        "LoRA and a whole layer",
        partial(language_trainer, change=partial(adapted, kind="LoraConfig", r=4, modules_to_save=["lm_head"])),
    ),
    "peft-ia3": ("Trainer", "IA3", partial(language_trainer, change=partial(adapted, kind="IA3Config"))),
    "peft-prompt": (
        "Trainer",
        "prompt tuning",
        partial(language_trainer, change=partial(adapted, kind="PromptTuningConfig", num_virtual_tokens=4)),
    ),
    "peft-prefix": (
        "Trainer",
        "prefix tuning",
        partial(language_trainer, change=partial(adapted, kind="PrefixTuningConfig", num_virtual_tokens=4)),
    ),
    "peft-two": ("Trainer", "two named adapters", partial(language_trainer, change=two_adapters)),
}
DATASETS = {
    "datasets-streamed": ("Trainer", "streamed", streamed),
    "datasets-shuffled": ("Trainer", "streamed, shuffled by a buffer", partial(streamed, buffer=16)),
}
EVALUATE = {"evaluate": ("Trainer", "metric, best model at the end", evaluated)}
OPTIMUM = {"optimum-shape": ("subclass of Trainer", "teacher, own arguments, optimizer and saving", distilled)}
