"""Uses of `self.accelerator` in subclasses, as in public projects. A case makes the Trainer's class.

Each case runs under transformers and under hf_compat. Both have to see the same values in `seen`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers import toy

CASES = {}


def case(**arguments):
    def note(make):
        CASES[make.__name__] = (make, arguments)
        return make

    return note


def whole(model):
    return getattr(model, "module", model)


@case(gradient_accumulation_steps=3)
def backward(api):
    class Own(api.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


@case()
def backward_twice_through_one_graph(api):
    class Own(api.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            outputs = model(**self._prepare_inputs(inputs))
            self.accelerator.backward(outputs["loss"], retain_graph=True)
            second = outputs["logits"].pow(2).mean()
            self.accelerator.backward(second)
            return (outputs["loss"] + second).detach()

    return Own


@case(gradient_accumulation_steps=3)
def accumulate(api):
    class Own(api.Trainer):
        def training_step(self, model, *rest):
            accelerator = self.accelerator
            before = accelerator.sync_gradients
            with accelerator.accumulate(model):
                inside = accelerator.sync_gradients
                loss = super().training_step(model, *rest)
            self.seen.append((before, inside, accelerator.step, accelerator.gradient_state.num_steps))
            return loss

    return Own


@case(gradient_accumulation_steps=2)
def accumulate_with_steps_of_its_own(api):
    class Own(api.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.gradient_accumulation_steps = 2

        def training_step(self, model, *rest):
            with self.accelerator.accumulate(model):
                self.seen.append((self.accelerator.sync_gradients, self.accelerator.gradient_accumulation_steps))
                return super().training_step(model, *rest)

    return Own


@case(gradient_accumulation_steps=2)
def no_sync(api):
    class Own(api.Trainer):
        def training_step(self, model, *rest):
            leaves = contextlib.nullcontext() if self.accelerator.sync_gradients else self.accelerator.no_sync(model)
            with leaves:
                return super().training_step(model, *rest)

    return Own


@case(gradient_accumulation_steps=2)
def sync_gradients_set_by_hand(api):
    class Own(api.Trainer):
        def training_step(self, *batch):
            self.accelerator.gradient_state._set_sync_gradients(True)
            self.seen.append((self.accelerator.sync_gradients, self.accelerator.gradient_state.sync_gradients))
            return super().training_step(*batch)

    return Own


@case(gradient_accumulation_steps=2)
def a_second_model_with_optimizer_and_schedule(api):
    class Own(api.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            torch.manual_seed(1)
            critic = nn.Linear(3, 3)
            optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            self.critic, self.second, self.schedule = self.accelerator.prepare(critic, optimizer, schedule)

        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            outputs = model(**self._prepare_inputs(inputs))
            loss = outputs["loss"] + self.critic(outputs["logits"]).pow(2).mean()
            loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            self.second.step()
            self.schedule.step()
            self.second.zero_grad()
            weight = float(whole(self.critic).weight.sum())
            self.seen.append((weight, self.schedule.get_last_lr(), self.second.param_groups[0]["lr"]))
            self.seen.append((self.second.step_was_skipped, isinstance(self.second, torch.optim.Optimizer)))
            return loss.detach()

    return Own


@case(gradient_accumulation_steps=2)
def the_optimizer_is_prepared_by_the_script(api):
    class Own(api.Trainer):
        def create_optimizer(self, model=None):
            own = torch.optim.Adam(self.model.parameters(), lr=self.args.learning_rate)
            self.optimizer = self.accelerator.prepare(own)
            return self.optimizer

    return Own


@case()
def the_schedule_is_prepared_by_the_script(api):
    class Own(api.Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
            self.lr_scheduler = self.accelerator.prepare(schedule)
            return self.lr_scheduler

    return Own


@case(bf16=True)
def a_reference_model_in_half_precision(api):
    class Own(api.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.reference = self.accelerator.prepare_model(copy.deepcopy(self.model), evaluation_mode=True)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            with torch.no_grad():
                reference = self.reference(**inputs)["logits"]
            self.seen.append((str(reference.dtype), float(reference.sum())))
            loss = outputs["loss"] + nn.functional.mse_loss(outputs["logits"], reference)
            return (loss, outputs) if return_outputs else loss

    return Own


@case(bf16=True)
def autocast(api):
    class Own(api.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            with self.accelerator.autocast():
                squares = outputs["logits"] @ outputs["logits"].T
            self.seen.append(str(squares.dtype))
            loss = outputs["loss"] + squares.float().mean()
            return (loss, outputs) if return_outputs else loss

    return Own


@case()
def gather(api):
    class Own(api.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            accelerator, own = self.accelerator, loss.detach()
            pair = accelerator.gather_for_metrics((outputs["logits"].detach(), inputs["labels"]))
            padded = accelerator.pad_across_processes(outputs["logits"].detach(), dim=1, pad_index=-1)
            self.seen.append((accelerator.gather(own).shape, float(accelerator.reduce(own, reduction="mean"))))
            self.seen.append((pair[0].shape, padded.shape, accelerator.gather_for_metrics(["a"], True)))
            return (loss, outputs) if return_outputs else loss

    return Own


@case()
def a_second_loader(api):
    class Own(api.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.further = self.accelerator.prepare(DataLoader(toy.rows(12, seed=5), batch_size=3, shuffle=True))
            self.batches = iter(self.further)

        def training_step(self, model, *rest):
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.further)
                batch = next(self.batches)
            self.seen.append(float(batch["x"].sum()))
            loss = super().training_step(model, *rest)
            further = model(**batch)["loss"]
            self.accelerator.backward(further)
            return loss + further.detach()

    return Own


@case()
def an_evaluation_over_a_loader_of_its_own(api):
    class Own(api.Trainer):
        def evaluate(self, *args, **kwargs):
            loader = self.accelerator.prepare(DataLoader(toy.rows(10, seed=3), batch_size=4))
            self.model.eval()
            for batch in loader:
                with torch.no_grad():
                    guessed = self.model(**batch)["logits"].argmax(-1)
                self.seen.append(self.accelerator.gather_for_metrics(guessed).tolist())
            return {"eval_x": 1.0}

    return Own


@case(max_grad_norm=0.0, gradient_accumulation_steps=2)
def clips_by_itself(api):
    class Own(api.Trainer):
        def training_step(self, *batch):
            loss = super().training_step(*batch)
            if self.accelerator.sync_gradients:
                self.seen.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.05)))
            return loss

    return Own


@case(max_grad_norm=0.0)
def clips_by_value(api):
    class Own(api.Trainer):
        def training_step(self, *batch):
            loss = super().training_step(*batch)
            self.accelerator.clip_grad_value_(self.model.parameters(), 0.01)
            return loss

    return Own


@case()
def unwraps(api):
    class Own(api.Trainer):
        def training_step(self, model, *rest):
            unwrap = self.accelerator.unwrap_model
            self.seen.append((unwrap(model) is self.model, unwrap(model, keep_fp32_wrapper=False) is self.model))
            state = self.accelerator.get_state_dict(model)
            self.seen.append((list(state), float(state["inner.weight"].sum())))
            return super().training_step(model, *rest)

    return Own


@case(gradient_accumulation_steps=2)
def reads_the_states(api):
    class Own(api.Trainer):
        def training_step(self, *batch):
            accelerator, state = self.accelerator, self.accelerator.gradient_state
            self.seen.append((accelerator.step, state.num_steps, state.sync_gradients, state.plugin_kwargs))
            self.seen.append((state.end_of_dataloader, state.in_dataloader, state.remainder))
            self.seen.append((accelerator.process_index, accelerator.num_processes, accelerator.is_last_process))
            self.seen.append((str(accelerator.device), str(accelerator.distributed_type), accelerator.mixed_precision))
            return super().training_step(*batch)

    return Own


@case()
def lists_what_is_prepared(api):
    class Own(api.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.reference = self.accelerator.prepare(nn.Linear(2, 2))
            self.note()

        def note(self):
            held = self.accelerator
            self.seen.append((len(held._models), len(held._optimizers), len(held._schedulers)))
            self.seen.append(bool(held._models) and held._models[0] is self.model)

        def training_step(self, *batch):
            self.note()
            return super().training_step(*batch)

        def train(self, *args, **kwargs):
            output = super().train(*args, **kwargs)
            self.note()
            return output

    return Own


@case()
def one_process_ends_all(api):
    class Own(api.Trainer):
        def training_step(self, *batch):
            if self.state.global_step == 1:
                self.accelerator.set_trigger()
            self.seen.append(self.accelerator.check_trigger())
            return super().training_step(*batch)

    return Own


@case()
def skips_batches(api):
    class Own(api.Trainer):
        def train(self, *args, **kwargs):
            rest = self.accelerator.skip_first_batches(self.get_train_dataloader(), 2)
            self.seen.append([float(batch["x"].sum()) for batch in rest])
            return super().train(*args, **kwargs)

    return Own


@case()
def joins_uneven_inputs(api):
    class Own(api.Trainer):
        def training_step(self, model, *rest):
            with self.accelerator.join_uneven_inputs([whole(model)]):
                return super().training_step(model, *rest)

    return Own


@case()
def trackers(api):
    class Own(api.Trainer):
        def training_step(self, *batch):
            self.accelerator.init_trackers("project", config={"a": 1})
            loss = super().training_step(*batch)
            self.accelerator.log({"x": float(loss)}, step=self.state.global_step)
            self.seen.append((self.accelerator.trackers, self.accelerator.log_with))
            return loss

    return Own


@case(lr_scheduler_type="constant", gradient_accumulation_steps=2)
def goes_back_to_a_state(api):
    class Own(api.Trainer):
        folder = None

        def training_step(self, *batch):
            if self.state.global_step == 2 and self.folder is None:
                self.folder = os.environ.get("STATE_FOLDER") or tempfile.mkdtemp()
                self.accelerator.save_state(os.path.join(self.folder, api.__name__))
                self.accelerator.wait_for_everyone()
                written = os.listdir(os.path.join(self.folder, api.__name__))
                self.seen.append(sorted(written))
            if self.state.global_step == 4 and self.folder != "done":
                self.accelerator.load_state(os.path.join(self.folder, api.__name__))
                self.folder = "done"
            return super().training_step(*batch)

    return Own


@case()
def writes_the_model(api):
    class Own(api.Trainer):
        def train(self, *args, **kwargs):
            output = super().train(*args, **kwargs)
            with tempfile.TemporaryDirectory() as folder:
                self.accelerator.save_model(self.model, folder, max_shard_size=500)
                self.seen.append(sorted(os.listdir(folder)))
            return output

    return Own
