"""Trainers as in public projects: losses, steps, optimizers, data, evaluation.

A case is a function of the package (`transformers` or `hf_compat`). It returns `trainer` (the class), `arguments`,
`callbacks`, `seen` (a list that both engines have to fill alike) and the Trainer's other keywords.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, SequentialSampler, Subset, WeightedRandomSampler

from helpers import toy

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class InOrder(Sampler):
    """The samples by length, longest first."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(sorted(range(len(self.data)), key=lambda i: float(self.data[i]["x"].sum())))


# Losses


@case
def distillation(api):
    class Distils(api.Trainer):
        def __init__(self, *args, teacher=None, temperature=2.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher, self.temperature = teacher, temperature
            self._move_model_to_device(self.teacher, self.model.outer.weight.device)
            self.teacher.eval()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            student = model(**inputs)
            with torch.no_grad():
                teacher = self.teacher(**inputs)
            soft = functional.kl_div(
                functional.log_softmax(student["logits"] / self.temperature, -1),
                functional.softmax(teacher["logits"] / self.temperature, -1),
                reduction="batchmean",
            )
            loss = 0.5 * student["loss"] + 0.5 * soft * self.temperature**2
            return (loss, student) if return_outputs else loss

    torch.manual_seed(5)
    return {"trainer": Distils, "keywords": {"teacher": toy.Classifier()}}


@case
def two_forward_passes(api):  # R-Drop, with its own averages in the log
    class Drops(api.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.sums, self.count = defaultdict(float), 0

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            first, second = model(**inputs), model(**inputs)
            consistency = functional.mse_loss(first["logits"], second["logits"])
            if model.training:
                self.sums["consistency"] += consistency.item()
                self.count += 1
            loss = (first["loss"] + second["loss"]) / 2 + 0.7 * consistency
            return (loss, first) if return_outputs else loss

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            if self.control.should_log and self.count:
                self.log({name: value / self.count for name, value in self.sums.items()})
                self.sums, self.count = defaultdict(float), 0
                self.control.should_log = True
            return super()._maybe_log_save_evaluate(*args, **kwargs)

    return {"trainer": Drops}


@case
def metrics_kept_for_log(api):  # TRL's shape, with the `log` of 4.47
    class Keeps(api.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            mode = "train" if self.model.training else "eval"
            right = (outputs["logits"].argmax(-1) == inputs["labels"]).float().mean()
            self._metrics[mode]["accuracy"].append(self.accelerator.gather_for_metrics(right).mean().item())
            return (loss, outputs) if return_outputs else loss

        def log(self, logs, start_time=None):
            mode = "train" if self.model.training else "eval"
            metrics = {name: sum(values) / len(values) for name, values in self._metrics[mode].items()}
            if mode == "eval":
                metrics = {f"eval_{name}": value for name, value in metrics.items()}
            super().log({**logs, **metrics}, start_time)
            self._metrics[mode].clear()

    return {"trainer": Keeps}


@case
def log_of_4_45(api):
    class Logs(api.Trainer):
        def log(self, logs):
            if "loss" in logs:
                logs["perplexity"] = math.exp(logs["loss"])
            logs["updates"] = self.state.global_step
            super().log(logs)

    return {"trainer": Logs}


@case
def loss_with_an_ema_in_the_state(api):
    class Remembers(api.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            found = super().compute_loss(model, inputs, *args, **kwargs)
            loss = found[0] if isinstance(found, tuple) else found
            before = getattr(self.state, "loss_ema", None)
            self.state.loss_ema = loss.item() if before is None else 0.9 * before + 0.1 * loss.item()
            return found

        def log(self, logs, *args, **kwargs):
            logs["ema"] = getattr(self.state, "loss_ema", 0.0)
            return super().log(logs, *args, **kwargs)

    return {"trainer": Remembers}


@case
def weights_that_follow_the_progress(api):  # a curriculum by `state.epoch` and `state.max_steps`
    class Curriculum(api.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            share = self.state.global_step / max(self.state.max_steps, 1)
            weight = torch.tensor([1.0, 1.0 + share, 1.0 + (self.state.epoch or 0.0)])
            loss = functional.cross_entropy(outputs["logits"], labels, weight=weight)
            return (loss, outputs) if return_outputs else loss

    return {"trainer": Curriculum}


@case
def contrastive_over_gathered(api):
    class Contrasts(api.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            reps = functional.normalize(self.accelerator.gather(outputs["logits"]), dim=-1)
            other = functional.normalize(model(inputs["x"] + 0.1)["logits"], dim=-1)
            loss = functional.cross_entropy(reps @ other.T / 0.05, torch.arange(len(reps), device=reps.device))
            return (loss, outputs) if return_outputs else loss

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(inputs))
            return (loss, None, None)

    return {"trainer": Contrasts}


@case
def loss_function_of_the_script(api):
    def focal(outputs, labels, num_items_in_batch=None):
        log = functional.log_softmax(outputs["logits"], -1).gather(-1, labels[:, None])[:, 0]
        total = -((1 - log.exp()) ** 2 * log)
        return total.mean() if num_items_in_batch is None else total.sum() / num_items_in_batch

    return {"keywords": {"compute_loss_func": focal}}


# Steps


@case
def adversarial_step(api):  # FGM: a second backward pass on a perturbed weight
    class Attacks(api.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            weight = self.accelerator.unwrap_model(model).inner.weight
            kept, norm = weight.data.clone(), weight.grad.norm()
            if norm != 0:
                weight.data.add_(0.3 * weight.grad / norm)
                super().training_step(model, dict(inputs), num_items_in_batch)
                weight.data = kept
            return loss

    return {"trainer": Attacks}


@case
def own_backward(api):  # 4.3x's `training_step`, copied
    class Steps(api.Trainer):
        def training_step(self, model, inputs, num_items=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            if self.args.n_gpu > 1:
                loss = loss.mean()
            self.accelerator.backward(loss)
            return loss.detach() / self.args.gradient_accumulation_steps

    return {"trainer": Steps}


@case
def chunks_of_a_batch(api):  # GradCache's shape: backward inside, several times a step
    class Chunks(api.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            model.train()
            inputs = self._prepare_inputs(inputs)
            total = torch.tensor(0.0)
            for rows in torch.arange(len(inputs["x"])).chunk(2):
                part = {name: value[rows] for name, value in inputs.items()}
                with self.autocast_smart_context_manager():
                    loss = model(**part)["loss"] * len(rows) / len(inputs["x"])
                self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
                total += loss.detach()
            return total / self.current_gradient_accumulation_steps

    return {"trainer": Chunks}


@case
def gradients_changed_in_the_step(api):
    class Masks(api.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            for name, parameter in self.model.named_parameters():
                if "norm" in name and parameter.grad is not None:
                    parameter.grad.zero_()
            return loss

    return {"trainer": Masks}


@case
def inputs_prepared_by_the_trainer(api):
    class Prepares(api.Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            if self.model.training and self.is_in_train:
                inputs["x"] = inputs["x"] + 0.05 * torch.randn_like(inputs["x"])
            return inputs

    return {"trainer": Prepares}


@case
def model_put_in_eval_mode_by_parts(api):
    class Frozen(toy.Classifier):
        def train(self, mode=True):
            super().train(mode)
            self.dropout.eval()
            return self

    return {"model": Frozen}


# Optimizers and schedules


@case
def groups_with_rates_of_their_own(api):  # LLaVA's shape
    class Groups(api.Trainer):
        def create_optimizer(self):
            if self.optimizer is None:
                decaying = [n for n in self.get_decay_parameter_names(self.model) if "bias" not in n]
                groups = []
                for is_head in (False, True):
                    for decays in (False, True):
                        chosen = [
                            p
                            for n, p in self.model.named_parameters()
                            if p.requires_grad and n.startswith("outer") is is_head and (n in decaying) is decays
                        ]
                        group = {"params": chosen, "weight_decay": 0.1 if decays else 0.0}
                        groups.append(group | ({"lr": 2e-2} if is_head else {}))
                kind, options = api.Trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
                self.optimizer = kind(groups, **options)
            return self.optimizer

    return {"trainer": Groups, "seen_rates": True}


@case
def both_made_at_once(api):
    class Makes(api.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, num_training_steps)

    return {"trainer": Makes}


@case
def scheduler_of_its_own(api):  # 4.3x LLaMA-Factory: no `return`, `optimizer` may be None
    class Schedules(api.Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            if optimizer is None:
                optimizer = self.create_optimizer()
            if self.lr_scheduler is None:
                self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
                self._created_lr_scheduler = True

    return {"trainer": Schedules}


@case
def given_optimizers(api):
    def build():
        model = toy.Classifier()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"model": model, "optimizers": (optimizer, schedule)}

    return {"build": build}


@case
def optimizer_set_after_construction(api):
    def before(trainer):
        trainer.optimizer = torch.optim.Adagrad(trainer.model.parameters(), lr=0.05)
        trainer.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 6)

    return {"before": before}


@case
def rates_edited_by_a_callback(api):
    class Edits(api.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if state.global_step % 2 else 1.5

    return {"callbacks": [Edits()]}


@case
def optimizer_wrapped_in_the_trainer(api):
    class Lookahead(torch.optim.AdamW):
        def step(self, closure=None):
            slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
            found = super().step(closure)
            with torch.no_grad():
                for group, kept in zip(self.param_groups, slow, strict=True):
                    for parameter, before in zip(group["params"], kept, strict=True):
                        parameter.lerp_(before, 0.25)
            return found

    return {"keywords": {"optimizer_cls_and_kwargs": (Lookahead, {"lr": 3e-3, "betas": (0.8, 0.95)})}}


# Data


@case
def sampler_of_4_51(api):
    class Weighs(api.Trainer):
        def _get_train_sampler(self):
            weights = [1.0 + row["labels"] for row in self.train_dataset]
            return WeightedRandomSampler(weights, len(weights), replacement=True)

    return {"trainer": Weighs}


@case
def sampler_with_anything(api):  # LLaMA-Factory's
    class Orders(api.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

        def _get_eval_sampler(self, eval_dataset):
            return InOrder(eval_dataset)

    return {"trainer": Orders}


@case
def loaders_of_its_own(api):
    class Loads(api.Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(
                DataLoader(self.train_dataset, 3, shuffle=True, collate_fn=self.data_collator, drop_last=True)
            )

        def get_eval_dataloader(self, eval_dataset=None):
            chosen = self.eval_dataset if eval_dataset is None else eval_dataset
            return DataLoader(chosen, batch_size=5, sampler=InOrder(chosen), collate_fn=self.data_collator)

    return {"trainer": Loads}


class Mixture:
    """A loader other than torch's, with batches of several tasks in turn."""

    def __init__(self, loaders):
        self.loaders = loaders
        self.dataset = [None] * sum(len(loader.dataset) for loader in loaders)

    def __len__(self):
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self):
        running = [iter(loader) for loader in self.loaders]
        while running:
            for one in list(running):
                try:
                    yield next(one)
                except StopIteration:
                    running.remove(one)


@case
def several_tasks(api):
    class Tasks(api.Trainer):
        def get_train_dataloader(self):
            half = len(self.train_dataset) // 2
            parts = [Subset(self.train_dataset, range(half)), Subset(self.train_dataset, range(half, 2 * half))]
            make = [DataLoader(p, self._train_batch_size, shuffle=True, collate_fn=self.data_collator) for p in parts]
            return Mixture(make)

    return {"trainer": Tasks}


@case
def data_changed_by_epoch(api):  # a callback tells the data set of the epoch, by the loader
    class Turns(torch.utils.data.Dataset):
        epoch = 0

        def __len__(self):
            return 24

        def __getitem__(self, index):
            row = toy.rows(48)[index + 24 * (self.epoch % 2)]
            return dict(row)

    class Tells(api.TrainerCallback):
        def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
            train_dataloader.dataset.epoch = int(state.epoch)

    return {"train": Turns, "callbacks": [Tells()]}


@case
def collator_that_counts(api):
    seen = []

    class Collates:
        def __call__(self, rows):
            seen.append(len(rows))
            return {
                "x": torch.stack([r["x"] for r in rows]) * (0.99 ** len(seen)),
                "labels": torch.tensor([r["labels"] for r in rows]),
            }

    # resumed, upstream's collator has not counted the batch that was read ahead
    return {"collator": Collates(), "seen": seen, "crosses": {"plain", "accumulation", "two evaluations", "best"}}


# Evaluation


@case
def perplexity_after_the_loop(api):
    class Adds(api.Trainer):
        def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(output.metrics[f"{metric_key_prefix}_loss"])
            return output

    return {"trainer": Adds, "metric": "eval_perplexity"}


@case
def loop_of_its_own(api):
    from transformers.trainer_utils import EvalLoopOutput

    class Loops(api.Trainer):
        def evaluation_loop(
            self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
        ):
            self.model.eval()
            losses, logits, labels = [], [], []
            for batch in dataloader:
                batch = self._prepare_inputs(batch)
                with torch.no_grad():
                    outputs = self.model(**batch)
                losses.append(outputs["loss"].item())
                logits.append(outputs["logits"])
                labels.append(batch["labels"])
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            metrics = {
                f"{metric_key_prefix}_loss": sum(losses) / len(losses),
                f"{metric_key_prefix}_accuracy": (torch.cat(logits).argmax(-1) == torch.cat(labels))
                .float()
                .mean()
                .item(),
            }
            count = len(dataloader.dataset)
            return EvalLoopOutput(torch.cat(logits).numpy(), torch.cat(labels).numpy(), metrics, count)

    return {"trainer": Loops, "metric": "eval_accuracy"}


@case
def evaluate_with_post_processing(api):  # question answering's shape
    class Answers(api.Trainer):
        def __init__(self, *args, eval_examples=None, post_process=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.eval_examples, self.post_process = eval_examples, post_process

        def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
            eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
            loader = self.get_eval_dataloader(eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    loader,
                    description="Evaluation",
                    prediction_loss_only=None,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )
            finally:
                self.compute_metrics = compute_metrics
            metrics = {f"{metric_key_prefix}_{k}": v for k, v in self.post_process(output.predictions).items()}
            metrics.update(output.metrics)
            if self.args.should_save:
                self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    def spread(predictions):
        return {"spread": float(predictions.std())}

    return {"trainer": Answers, "keywords": {"post_process": spread}, "metric": "eval_spread"}


@case
def evaluate_on_train_data_at_the_end_of_epochs(api):
    class Evaluates(api.TrainerCallback):
        def __init__(self):
            self.trainer = None

        def on_epoch_end(self, args, state, control, **kwargs):
            if control.should_evaluate:
                kept = copy.deepcopy(control)
                self.trainer.evaluate(eval_dataset=self.trainer.train_dataset, metric_key_prefix="train")
                return kept
            return None

    callback = Evaluates()

    def before(trainer):
        callback.trainer = trainer
        trainer.add_callback(callback)

    return {
        "before": before,
        "arguments": {"eval_strategy": "epoch", "save_strategy": "epoch"},
        "crosses": {"plain", "accumulation", "two evaluations", "best"},
    }


@case
def evaluate_twice_in_the_loop(api):
    class Twice(api.Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            if metric_key_prefix == "eval":
                more = super().evaluate(toy.rows(9, 4), ignore_keys, metric_key_prefix="eval_hard")
                metrics |= more
            return metrics

    return {"trainer": Twice}


@case
def predictions_written_at_every_evaluation(api):
    class Writes(api.Trainer):
        def evaluation_loop(self, dataloader, *args, **kwargs):
            output = super().evaluation_loop(dataloader, *args, **kwargs)
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            folder.mkdir(exist_ok=True, parents=True)
            (folder / "logits.json").write_text(
                json.dumps([] if output.predictions is None else output.predictions.tolist())
            )
            return output

    return {"trainer": Writes, "arguments": {"save_total_limit": None}}


@case
def prediction_step_that_pads(api):
    class Pads(api.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **options):
            labels = inputs["labels"]
            loss, logits, _ = super().prediction_step(model, inputs, False, ignore_keys)
            return loss, functional.pad(logits, (0, 2)), labels

    def metrics(prediction):
        return {"width": prediction.predictions.shape[1], "mean": float(prediction.predictions.mean())}

    return {"trainer": Pads, "keywords": {"compute_metrics": metrics}}


@case
def metrics_with_logits_preprocessed(api):
    def metrics(found):
        predictions, labels = found
        return {"accuracy": float((predictions == labels).mean()), "f1": {"a": 0.5, "b": [1, 2]}}

    return {
        "keywords": {
            "compute_metrics": metrics,
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        },
        "metric": "eval_accuracy",
    }


@case
def several_evaluation_sets(api):
    return {
        "keywords": {"eval_dataset": {"a": toy.rows(10, 3), "b": toy.rows(7, 4)}},
        "metric": "eval_b_loss",
    }
