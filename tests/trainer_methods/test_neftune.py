"""NEFTune's noise exists only during `train()`, however it ends, and never in a file. Numbers are in tests/parity."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import nn

import hf_compat
from helpers import toy
from helpers.parity.compare import same
from hf_compat import HFDataModule, HFModule, Trainer, TrainerCallback, TrainingArguments
from hf_compat.errors import ArgumentError

NOISE = {"neftune_noise_alpha": 5.0}
ENDS = [Exception("a mistake"), KeyboardInterrupt()]


def gpt2():
    hf_compat.set_seed(1)
    return toy.tiny_gpt2()


def noise_on(model) -> tuple[int, bool]:
    layer = model.get_input_embeddings()
    return len(layer._forward_hooks), hasattr(layer, "neftune_noise_alpha")


@pytest.fixture
def make(make_args):
    def make(callbacks=(), cls=Trainer, **values):
        args = make_args(**{**NOISE, "max_steps": 3, **values})
        return cls(gpt2(), args, train_dataset=toy.blocks(), eval_dataset=toy.blocks(6), callbacks=list(callbacks))

    return make


def raising(error):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen = noise_on(model)
        raise error

    return type("Raising", (TrainerCallback,), {"on_step_end": on_step_end})()


@pytest.mark.parametrize("error", ENDS)
def test_the_noise_is_gone_after_an_exception(make, error):
    callback = raising(error)
    trainer = make([callback])
    with pytest.raises(type(error)):
        trainer.train()
    assert callback.seen == (1, True) and noise_on(trainer.model) == (0, False)
    trainer.pop_callback(type(callback))
    trainer.train()
    assert noise_on(trainer.model) == (0, False) and trainer.neftune_hook_handle is None


def noting(name):
    def method(self, args, state, control, model=None, **kwargs):
        self.seen[name] = noise_on(model)

    return method


def test_it_is_removed_after_the_last_event_as_upstream(make, tmp_path):
    class Watching(TrainerCallback, transformers.TrainerCallback):
        def __init__(self):
            self.seen = {}

        on_train_begin, on_save, on_train_end = noting("begin"), noting("save"), noting("end")

    found = []
    for package in (hf_compat, transformers):
        watching = Watching()
        values = {"output_dir": str(tmp_path / package.__name__), "max_steps": 2, "save_steps": 1, "use_cpu": True}
        args = package.TrainingArguments(**values, **NOISE, report_to="none", disable_tqdm=True)
        package.Trainer(gpt2(), args, train_dataset=toy.blocks(), callbacks=[watching]).train()
        found.append(watching.seen)
    assert found[0] == found[1] == dict.fromkeys(("begin", "save", "end"), (1, True))


def test_an_evaluation_before_training_has_no_noise(make):
    noisy, silent = make(), make(neftune_noise_alpha=None)
    assert noisy.neftune_noise_alpha == 5.0 and silent.neftune_noise_alpha is None
    assert noisy.evaluate()["eval_loss"] == silent.evaluate()["eval_loss"]
    assert noisy.train().training_loss != silent.train().training_loss


def test_a_resumed_run_has_the_noise_of_the_uninterrupted_one(make):
    values = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole, resumed = make(**values), make(**values)
    whole.train()
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))


def test_nothing_of_it_is_saved(make):
    trainer = make(save_strategy="steps", save_steps=3)
    trainer.train()
    folder = f"{trainer.args.output_dir}/checkpoint-3"
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert noise_on(read) == (0, False) and "neftune" not in read.config.to_json_string()
    assert torch.load(f"{folder}/training_args.bin")["neftune_noise_alpha"] == 5.0


def test_a_model_that_names_no_embeddings(make_args):
    for model in (toy.Classifier(), transformers.PreTrainedModel(transformers.PretrainedConfig())):
        with pytest.raises(ArgumentError, match=r"(?s)neftune_noise_alpha.*get_input_embeddings") as raised:
            Trainer(model, make_args(**NOISE), train_dataset=toy.rows()).train()
        assert type(model).__name__ in str(raised.value)


@pytest.mark.parametrize("strength", [-1.0, float("nan"), "much"])
def test_a_strength_that_is_none(make, strength):
    trainer = make()
    trainer.neftune_noise_alpha = strength
    with pytest.raises(ArgumentError, match="neftune_noise_alpha"):
        trainer.train()


class Named(nn.Module):
    """A user-defined model that names its input embeddings."""

    def __init__(self):
        super().__init__()
        self.tagger = toy.Tagger()

    def get_input_embeddings(self):
        return self.tagger.embedding

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.tagger(input_ids, attention_mask, labels)


def test_a_model_of_ones_own(make_args):
    losses = []
    for values in (NOISE, {}):
        hf_compat.set_seed(1)
        trainer = Trainer(Named(), make_args(**values), toy.pad, toy.sequences())
        losses.append(trainer.train().training_loss)
    assert losses[0] != losses[1]


# A Lightning trainer of the user's own -------------------------------------------------------------------------------


class Stops(pl.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, pl_module, *rest):
        self.seen = noise_on(pl_module.model)
        if self.error is not None:
            raise self.error


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("error", [None, ValueError("a mistake")])
def test_a_native_fit(tmp_path, error):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    args, stops = TrainingArguments(str(tmp_path), use_cpu=True, **NOISE), Stops(error)
    module, data = HFModule(gpt2(), args), HFDataModule(args, train_dataset=toy.blocks(), eval_dataset=toy.blocks(6))
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[stops],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        **quiet,
    )
    try:
        trainer.fit(module, data)
    except ValueError as raised:
        assert raised is error
    assert stops.seen == (1, True) and noise_on(module.model) == (0, False)
    stops.error = None
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    assert noise_on(module.model) == (0, False) and trainer.callbacks == [stops]
