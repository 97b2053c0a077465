"""Optimizers that change the step, in a Lightning trainer of the user's own: the numbers of `transformers.Trainer`."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers

import hf_compat
from helpers.toy import Classifier, rows, weights
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, HfCompatWarning, OverrideError, UnsupportedArgument, warn_once

OPTIONS = {
    "per_device_train_batch_size": 4, "learning_rate": 0.01, "lr_scheduler_type": "constant",
    "use_cpu": True, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
KINDS = {
    "schedule_free_adamw": {},
    "lomo": {},
    "galore_adamw_layerwise": {"optim_target_modules": "all-linear", "optim_args": "rank=2,update_proj_gap=4"},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:This implementation of AdamW:FutureWarning"),
]


class Automatic(HFModule):
    """Lightning runs the backward pass and steps."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.automatic_optimization = True

    def training_step(self, window, batch_idx):
        return self.model(**window)["loss"]


class OwnBackward(HFModule):
    def backward(self, loss, *args, **kwargs):
        loss.backward()


def made(folder, name, kind=HFModule, **changed):
    hf_compat.set_seed(3)
    args = TrainingArguments(str(folder), optim=name, **{**OPTIONS, **KINDS[name], **changed})
    return kind(Classifier(), args), args


def fitted(module, args, trainer, data=None):
    hf_compat.set_seed(args.seed)
    trainer.fit(module, HFDataModule(args, data or rows(20), rows(9, seed=5)))
    return weights(module), float(trainer.callback_metrics["eval_loss"])


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_equals_transformers(tmp_path, lightning, name):
    module, args = made(tmp_path, name)
    ours, our_loss = fitted(module, args, lightning(max_epochs=2))
    transformers.set_seed(3)
    model = Classifier()
    upstream = transformers.TrainingArguments(
        str(tmp_path),
        optim=name,
        eval_strategy="epoch",
        save_strategy="no",
        num_train_epochs=2,
        **OPTIONS,
        **KINDS[name],
    )
    trainer = transformers.Trainer(model, upstream, train_dataset=rows(20), eval_dataset=rows(9, seed=5))
    trainer.train()
    theirs = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(ours, theirs)
    assert our_loss == trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("name", KINDS)
def test_automatic_optimization_makes_the_same_steps(tmp_path, lightning, name):
    args = {"max_grad_norm": 0.0}
    manual = fitted(*made(tmp_path, name, **args), lightning(max_epochs=2))
    automatic = fitted(*made(tmp_path, name, Automatic, **args), lightning(max_epochs=2))
    assert torch.equal(automatic[0], manual[0])
    assert automatic[1] == manual[1]


class Failing(list):
    """Rows of which one cannot be read."""

    def __getitem__(self, index):
        if index == 19:
            raise ValueError("no such row")
        return super().__getitem__(index)


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_after_others_steps_once(tmp_path, lightning, name):
    module, args = made(tmp_path, name)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    once = fitted(module, args, lightning())
    with pytest.raises(ValueError, match="no such row"):
        fitted(module, args, lightning(), Failing(rows(20)))
    module.load_state_dict(before)
    again = fitted(module, args, lightning())
    assert torch.equal(once[0], again[0])
    assert once[1] == again[1]


def test_what_is_validated_after_a_fit_is_the_average(tmp_path, lightning):
    module, args = made(tmp_path, "schedule_free_adamw")
    hf_compat.set_seed(args.seed)
    lightning(max_steps=7, max_epochs=-1, limit_val_batches=0).fit(module, HFDataModule(args, rows(20), rows(9)))
    trained = weights(module)
    validated = lightning()
    found = validated.validate(module, HFDataModule(args, rows(20), rows(9)), verbose=False)[0]["eval_loss"]
    averaged = weights(module)
    assert not torch.equal(trained, averaged)
    module.steps.optimizer.eval()
    assert torch.equal(weights(module), averaged)
    assert found == validated.validate(module, HFDataModule(args, rows(20), rows(9)), verbose=False)[0]["eval_loss"]


def test_weights_that_are_loaded_after_a_fit_are_not_averaged_with_it(tmp_path, lightning):
    module, args = made(tmp_path, "schedule_free_adamw")
    trainer = lightning(max_epochs=2)
    fitted(module, args, trainer)
    trainer.save_checkpoint(tmp_path / "best.ckpt")
    kept = weights(module)
    lightning(max_steps=3, max_epochs=-1, limit_val_batches=0).fit(module, HFDataModule(args, rows(20), rows(9)))
    data = HFDataModule(args, eval_dataset=rows(9))
    lightning().validate(module, data, ckpt_path=tmp_path / "best.ckpt", verbose=False)
    assert torch.equal(weights(module), kept)


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_goes_on_from_a_checkpoint(tmp_path, lightning, name):
    """What is lost there is lost in the Trainer, too: a fit from its folder and one of Lightning's make the same."""
    found = []
    for place in ("lightning", "trainer"):
        module, args = made(tmp_path / place, name)
        data = HFDataModule(args, rows(20), rows(9, seed=5))
        saved = tmp_path / place / "one.ckpt"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*as in transformers", category=HfCompatWarning)
            if place == "lightning":
                hf_compat.set_seed(args.seed)
                trainer = lightning(max_epochs=1)
                trainer.fit(module, data)
                trainer.save_checkpoint(saved)
            else:
                when = {"num_train_epochs": 1, "save_strategy": "epoch", "eval_strategy": "epoch"}
                options = TrainingArguments(str(tmp_path / place), optim=name, **OPTIONS, **KINDS[name], **when)
                Trainer(module.model, options, train_dataset=rows(20), eval_dataset=rows(9, seed=5)).train()
                saved = tmp_path / place / "checkpoint-5"
            fresh, _ = made(tmp_path / place / "again", name)
            lightning(max_epochs=2, limit_val_batches=0).fit(fresh, data, ckpt_path=saved)
        found.append(weights(fresh))
    assert torch.equal(*found)


def test_what_a_checkpoint_does_not_hold_is_told_of(tmp_path, lightning):
    warn_once.cache_clear()
    module, args = made(tmp_path, "galore_adamw_layerwise")
    trainer = lightning()
    fitted(module, args, trainer)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.warns(HfCompatWarning, match="states of the optimizers of single parameters"):
        lightning(max_epochs=2).fit(module, HFDataModule(args, rows(20)), ckpt_path=tmp_path / "one.ckpt")


def test_saving_weights_that_are_not_averaged_is_told_of(tmp_path, lightning):
    warn_once.cache_clear()
    module, args = made(tmp_path, "schedule_free_adamw")
    trainer = lightning(max_epochs=1, limit_val_batches=0)
    trainer.fit(module, HFDataModule(args, rows(20)))
    with pytest.warns(HfCompatWarning, match="not averaged"):
        trainer.save_checkpoint(tmp_path / "one.ckpt")


@pytest.mark.parametrize("setting", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
@pytest.mark.parametrize("name", ["lomo", "galore_adamw_layerwise"])
def test_gradients_that_are_gone_are_not_asked_for(tmp_path, lightning, name, setting):
    module, args = made(tmp_path, name, Automatic)
    before = weights(module)
    with pytest.raises(ArgumentError, match=next(iter(setting))):
        fitted(module, args, lightning(**setting))
    assert torch.equal(weights(module), before)


def test_a_backward_pass_of_the_modules_own_is_refused(tmp_path, lightning):
    with pytest.raises(OverrideError, match="backward"):
        fitted(*made(tmp_path, "lomo", OwnBackward), lightning())


@pytest.mark.filterwarnings("ignore:.*fp16:hf_compat.errors.InertArgumentWarning")  # without a GPU it does nothing
@pytest.mark.parametrize(
    ("name", "changed"),
    [("lomo", {"fp16": True}), ("galore_adamw_layerwise", {"gradient_accumulation_steps": 2})],
)
def test_what_cannot_work_is_refused_when_the_module_is_made(tmp_path, name, changed):
    with pytest.raises((UnsupportedArgument, ArgumentError), match=r"fp16|gradient_accumulation_steps"):
        made(tmp_path, name, **changed)
