"""Callbacks, checkpoints and whole loops as in public projects, see `upstream_user_trainers`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch

from helpers import toy
from helpers.upstream_user_trainers import case

# Callbacks


@case
def exponential_average(api):
    class Averages(api.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

        def on_step_end(self, args, state, control, model=None, **kwargs):
            for name, parameter in model.named_parameters():
                self.shadow[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)

        def on_evaluate(self, args, state, control, model=None, **kwargs):
            if hasattr(self, "shadow"):
                self.swap(model)
                self.swap(model)

        def on_save(self, args, state, control, model=None, **kwargs):
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            torch.save(self.shadow, folder / "ema.pt")

        def on_train_end(self, args, state, control, model=None, **kwargs):
            self.swap(model)

        def swap(self, model):
            for name, parameter in model.named_parameters():
                kept = parameter.detach().clone()
                parameter.data.copy_(self.shadow[name])
                self.shadow[name] = kept

    return {"callbacks": [Averages()]}


@case
def thawed_in_epochs(api):
    class Thaws(api.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.inner.requires_grad_(False)

        def on_epoch_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.epoch >= 1:
                model.inner.requires_grad_(True)

    return {"callbacks": [Thaws()]}


@case
def group_added_when_thawed(api):
    class Thaws(api.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            self.known = len(optimizer.param_groups)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                for parameter in model.inner.parameters():
                    parameter.requires_grad = True

    def build():
        model = toy.Classifier()
        for parameter in model.inner.parameters():
            parameter.requires_grad = False
        return {"model": model}

    return {"build": build, "callbacks": [Thaws()]}


@case
def flags_set_by_a_callback(api):
    class Sets(api.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:
                control.should_evaluate = True

        def on_step_end(self, args, state, control, **kwargs):
            control.should_log = state.global_step % 4 == 0
            if state.global_step in (1, 5):
                control.should_save = True
                control.should_evaluate = True
            if state.global_step == 7:
                control.should_epoch_stop = True
            return control

    return {"callbacks": [Sets()]}


@case
def stop_when_it_does_not_improve(api):
    class Stops(api.TrainerCallback):
        best, waited = None, 0

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            loss = metrics["eval_loss"]
            if self.best is None or loss < self.best - 0.05:
                self.best, self.waited = loss, 0
            else:
                self.waited += 1
            if self.waited >= 1:
                control.should_training_stop = True

    return {"callbacks": [Stops()]}


@case
def log_file_in_the_output_folder(api):  # LLaMA-Factory's
    class Writes(api.TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            path = os.path.join(args.output_dir, "trainer_log.jsonl")
            if os.path.exists(path):
                os.remove(path)

        def on_log(self, args, state, control, logs=None, **kwargs):
            entry = {
                "step": state.global_step,
                "of": state.max_steps,
                "loss": state.log_history[-1].get("loss"),
                "eval_loss": state.log_history[-1].get("eval_loss"),
                "lr": state.log_history[-1].get("learning_rate"),
                "share": round(state.global_step / max(state.max_steps, 1) * 100, 2),
            }
            with open(os.path.join(args.output_dir, "trainer_log.jsonl"), "a") as file:
                file.write(json.dumps(entry) + "\n")

    return {"callbacks": [Writes()], "read": ["trainer_log.jsonl"]}


@case
def arguments_changed_during_the_run(api):
    class Changes(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                args.max_grad_norm = 0.01
                args.logging_steps = 1
                state.logging_steps = 1
            if state.global_step == 4:
                args.eval_steps = state.eval_steps = 1

    return {"callbacks": [Changes()]}


@case
def callbacks_added_by_callbacks(api):
    seen = []

    class Second(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    class First(api.TrainerCallback):
        trainer = None

        def on_epoch_begin(self, args, state, control, **kwargs):
            self.trainer.remove_callback(Second)
            self.trainer.add_callback(Second())

    first = First()

    def before(trainer):
        first.trainer = trainer
        trainer.add_callback(first)
        trainer.add_callback(Second)

    return {"before": before, "seen": seen}


@case
def gradients_watched(api):
    seen = []

    class Watches(api.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append([p.grad.norm().item() for p in model.parameters()])

        def on_optimizer_step(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
            seen.append([optimizer.param_groups[0]["lr"], lr_scheduler.get_last_lr()[0], model.training])

        def on_substep_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    return {"callbacks": [Watches()], "seen": seen}


@case
def modes_watched(api):
    seen = []

    class Watches(api.TrainerCallback):
        def __getattribute__(self, name):
            if not name.startswith("on_"):
                return super().__getattribute__(name)

            def event(args, state, control, model=None, **kwargs):
                names = sorted(set(kwargs) - {"tokenizer", "trainer"})
                seen.append((name, state.global_step, state.epoch, model.training, names, control.should_log))

            return event

    return {"callbacks": [Watches()], "seen": seen}


@case
def handler_whose_call_event_is_replaced(api):  # SetFit's
    seen = []

    def before(trainer):
        handler = trainer.callback_handler
        call = handler.call_event

        def wrapped(event, args, state, control, **kwargs):
            seen.append((event, state.global_step, sorted(kwargs)))
            return call(event, args, state, control, **kwargs)

        handler.call_event = wrapped

    return {"before": before, "seen": seen}


# Checkpoints


@case
def adapter_beside_the_checkpoint(api):  # LLaVA's `_save_checkpoint` with an early return, and its `_save`
    class Saves(api.Trainer):
        def _save_checkpoint(self, model, trial, metrics=None):
            name = f"checkpoint-{self.state.global_step}"
            folder = os.path.join(self._get_output_dir(trial=trial), name)
            super()._save_checkpoint(model, trial)
            torch.save(self.model.outer.state_dict(), os.path.join(folder, "projector.bin"))

        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            number = re.search(r"checkpoint-(\d+)", output_dir or "")
            Path(output_dir, "number.txt").write_text(number.group(1) if number else "none")

    return {"trainer": Saves, "read": ["checkpoint-8/number.txt"]}


@case
def only_its_own_files(api):
    class Saves(api.Trainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), folder / "own.bin")

    return {"trainer": Saves, "crosses": {"plain", "accumulation", "two evaluations"}, "read": []}


@case
def save_model_of_its_own(api):
    class Saves(api.Trainer):
        def save_model(self, output_dir=None, _internal_call=False):
            folder = self.args.output_dir if output_dir is None else output_dir
            os.makedirs(folder, exist_ok=True)
            if self.is_world_process_zero():
                torch.save(self.accelerator.unwrap_model(self.model).state_dict(), os.path.join(folder, "model.pt"))
                torch.save(self.args, os.path.join(folder, "training_args.bin"))

        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            weights = torch.load(os.path.join(resume_from_checkpoint, "model.pt"), weights_only=True)
            (model or self.model).load_state_dict(weights)

        def _load_best_model(self):
            weights = torch.load(os.path.join(self.state.best_model_checkpoint, "model.pt"), weights_only=True)
            self.model.load_state_dict(weights)

    return {"trainer": Saves, "after": lambda trainer: trainer.save_model()}


@case
def optimizer_loaded_by_hand(api):
    class Loads(api.Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint):
            if checkpoint is None:
                return
            for part, name in ((self.optimizer, "optimizer.pt"), (self.lr_scheduler, "scheduler.pt")):
                part.load_state_dict(torch.load(os.path.join(checkpoint, name), weights_only=True))

        def _save_optimizer_and_scheduler(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)
            Path(output_dir, "groups.txt").write_text(str(len(self.optimizer.param_groups)))

    return {"trainer": Loads}


@case
def extra_state_with_the_checkpoint(api):
    class Counts(api.Trainer):
        tokens = 0

        def training_step(self, model, inputs, *args, **kwargs):
            self.tokens += inputs["x"].numel()
            return super().training_step(model, inputs, *args, **kwargs)

        def _save_checkpoint(self, *args, **kwargs):
            super()._save_checkpoint(*args, **kwargs)
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            (folder / "tokens.json").write_text(json.dumps(self.tokens))

        def _load_from_checkpoint(self, resume_from_checkpoint, *args, **kwargs):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
            self.tokens = json.loads(Path(resume_from_checkpoint, "tokens.json").read_text())

        def log(self, logs, *args, **kwargs):
            super().log({**logs, "tokens": self.tokens}, *args, **kwargs)

    return {"trainer": Counts}


@case
def checkpoints_removed_by_a_callback(api):
    class Removes(api.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            import shutil

            folders = sorted(Path(args.output_dir).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
            for folder in folders[:-2]:
                shutil.rmtree(folder)

    return {"callbacks": [Removes()], "crosses": {"plain", "accumulation", "resume", "two evaluations"}}


@case
def state_dict_of_the_model_replaced(api):  # alpaca-lora's
    def before(trainer):
        model = trainer.model
        original = model.state_dict
        model.state_dict = lambda *args, **kwargs: {
            n: v for n, v in original(*args, **kwargs).items() if "norm" not in n
        }

    return {"before": before, "crosses": {"plain", "accumulation", "two evaluations"}}


# The run as a whole


@case
def inner_loop_wrapped(api):
    seen = []

    class Wraps(api.Trainer):
        def _inner_training_loop(
            self, batch_size=None, args=None, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None
        ):
            seen.append((batch_size, args is self.args, trial, ignore_keys_for_eval, self.is_in_train))
            return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval)

    return {"trainer": Wraps, "seen": seen}


@case
def trained_twice(api):
    def after(trainer):
        trainer.train_dataset = toy.rows(20, 9)
        trainer.args.num_train_epochs = 1
        trainer.args.max_steps = -1
        trainer.train()

    return {"after": after}


@case
def phases_of_a_subclass(api):  # a `train` that trains in phases
    class Phases(api.Trainer):
        def train(self, *args, **kwargs):
            self.model.inner.requires_grad_(False)
            kept, self.args.max_steps = self.args.max_steps, 2
            super().train()
            self.model.inner.requires_grad_(True)
            self.args.max_steps = kept
            self.optimizer = self.lr_scheduler = None
            return super().train(*args, **kwargs)

    return {"trainer": Phases, "crosses": {"plain", "accumulation", "two evaluations", "best"}}


@case
def whole_copy_of_log_and_save(api):
    class Copies(api.Trainer):
        def _maybe_log_save_evaluate(
            self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
        ):
            updates = self.state.global_step - self._globalstep_last_logged
            if self.control.should_log and updates > 0:
                mean = self._nested_gather(tr_loss).mean().item()
                tr_loss -= tr_loss
                rate = self._get_learning_rate() if learning_rate is None else learning_rate
                logs = {"loss": round(mean / updates, 4), "grad_norm": float(grad_norm), "learning_rate": rate}
                self._globalstep_last_logged += updates
                self._total_loss_scalar += mean
                self.store_flos()
                self.log(logs, start_time)
            if self.control.should_evaluate:
                found = self._evaluate(trial, ignore_keys_for_eval)
                best = self._determine_best_metric(metrics=found, trial=trial)
                self.control.should_save = best if self.args.save_strategy == "best" else self.control.should_save
            if self.control.should_save:
                self._save_checkpoint(model, trial)
                handler = self.callback_handler
                self.control = handler.on_save(self.args, self.state, self.control)

    return {"trainer": Copies}


@case
def whole_copy_of_4_30(api):
    class Copies(api.Trainer):
        def _maybe_log_save_evaluate(self, tr_loss, model, trial, epoch, ignore_keys_for_eval, *more):
            if self.control.should_log:
                mean = self._nested_gather(tr_loss).mean().item()
                tr_loss -= tr_loss
                updates = max(self.state.global_step - self._globalstep_last_logged, 1)
                logs = {"loss": round(mean / updates, 4), "learning_rate": self._get_learning_rate()}
                self._total_loss_scalar += mean
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(logs)
            if self.control.should_evaluate:
                metrics = self.evaluate(ignore_keys=None)
                self._report_to_hp_search(trial, self.state.global_step, metrics)
            if self.control.should_save:
                self._save_checkpoint(self.model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    return {"trainer": Copies, "crosses": {"plain", "accumulation", "resume", "two evaluations"}}


@case
def loop_written_by_the_subclass(api):
    from transformers.trainer_utils import TrainOutput

    class Loops(api.Trainer):
        def _inner_training_loop(self, batch_size=None, args=None, **kwargs):
            loader = self.get_train_dataloader()
            self.current_gradient_accumulation_steps = 1
            self.create_optimizer_and_scheduler(num_training_steps=6)
            self.state.max_steps = 6
            self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
            for batch in list(loader)[:6]:
                loss = self.training_step(self.model, batch)
                self.optimizer.step()
                self.lr_scheduler.step()
                self.model.zero_grad()
                self.state.global_step += 1
                self.log({"loss": loss.item(), "learning_rate": self._get_learning_rate()})
            self.control = self.callback_handler.on_train_end(args, self.state, self.control)
            return TrainOutput(self.state.global_step, loss.item(), {})

    return {"trainer": Loops, "crosses": {"plain", "two evaluations"}}


@case
def model_made_by_a_function_that_seeds(api):  # scores kept by a callback; `save_strategy="best"`
    seen = []

    class Scores(api.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            seen.append((state.global_step, metrics["eval_loss"], state.best_metric, state.best_global_step))

        def on_save(self, args, state, control, **kwargs):
            seen.append(("saved", state.global_step, state.best_metric, state.best_global_step))

    def made():
        api.set_seed(9)
        return toy.Classifier()

    arguments = {"save_strategy": "best", "metric_for_best_model": "eval_loss", "seed": 3}
    crosses = {"plain", "accumulation", "two evaluations", "best"}  # there may be no fourth checkpoint to resume from
    parts = {"build": lambda: {"model_init": made}, "arguments": arguments, "crosses": crosses}
    return parts | {"callbacks": [Scores()], "seen": seen}


@case
def model_made_twice_by_a_function_that_seeds(api):
    seen = []

    class Twice(api.Trainer):
        def train(self, *args, **kwargs):
            super().train(*args, **kwargs)
            seen.append((self.state.best_metric, self.state.best_global_step, self.state.global_step))
            return super().train(*args, **kwargs)

    def made(trial):
        seen.append(trial)
        torch.manual_seed(9)
        return toy.Classifier()

    return {"trainer": Twice, "build": lambda: {"model_init": made}, "metric": "eval_loss", "seen": seen}
