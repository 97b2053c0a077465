"""What an instance of each class has in transformers 4.40 to 5.23: ours has it, too, or says what to do."""

from __future__ import annotations

import json
import warnings

import pytest

import hf_compat
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import AbsentName, InertArgumentWarning
from sweeps.releases import attributes

TABLE = json.loads(attributes.TABLE.read_text())


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    with warnings.catch_warnings(action="ignore"):
        found = attributes.found_in(hf_compat, str(tmp_path_factory.mktemp("runs")), TABLE)
    return attributes.as_rows({attributes.HERE_NAME: found})


def test_every_name_of_every_release_is_here_or_says_what_to_do(ours):
    """A name is there with the same value and takes the same parameters, has a reason, or a hint when it is read."""
    assert {release for rows in TABLE.values() for row in rows.values() for release in row} == {
        "4.40", "4.46", "4.57", "5.0", "5.23"
    }  # fmt: skip
    assert len(TABLE["Trainer"]) > 150 and len(TABLE["TrainingArguments"]) > 170
    found = list(attributes.differences(TABLE, ours))
    absent = {(kind, name) for kind, name, said in found if f"here {attributes.RAISES} AbsentName: " in said}
    unexplained = [one for one in found if one[:2] not in absent and one[1] not in attributes.REASONS.get(one[0], {})]
    assert unexplained == []
    needed = {(kind, name) for kind, name, _ in found}
    unneeded = {(kind, name) for kind, reasons in attributes.REASONS.items() for name in reasons} - needed
    assert unneeded == set(), "reasons for what does not differ"


def test_an_absent_name_is_an_attribute_error_with_a_hint(make_args):
    with pytest.warns(hf_compat.errors.HfCompatWarning, match="has a method `_activate_neftune`"):

        class WithNoise(Trainer):
            def _activate_neftune(self, model):
                return super()._activate_neftune(model)

    trainer = WithNoise(toy.Classifier(), make_args())
    assert not hasattr(trainer, "_save_tpu") and getattr(trainer, "_run_epoch", 7) == 7
    assert not hasattr(trainer.args, "_process_fsdp_args")
    with pytest.raises(AttributeError, match=r"WithNoise has no `_save_tpu` here.*\n\nHint: call `save_model`"):
        trainer._save_tpu(None)
    with pytest.raises(AbsentName, match="Hint: leave `neftune_noise_alpha` out"):
        trainer._activate_neftune(trainer.model)


def test_setters_take_the_words_of_4_x(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    assert args.set_lr_scheduler("cosine", warmup_ratio=0.25).warmup_steps == 0.25
    assert args.set_lr_scheduler("linear", 3, -1, 0.1, 20).warmup_steps == 20, "at the places of 4.x"
    assert args.set_lr_scheduler("linear", warmup_steps=5, warmup_ratio=0.1).warmup_steps == 5
    with pytest.warns(InertArgumentWarning, match="jit_mode_eval=True"):
        args.set_testing(jit_mode=True)
    with pytest.warns(InertArgumentWarning, match="jit_mode_eval=True"):
        args.set_evaluate(jit_mode=True)
    assert args.jit_mode_eval is True and args.framework == "pt"


def test_counts_may_take_the_samples_of_an_update(make_args):
    """As `set_initial_training_values` of 4.57 and 5.0."""

    class Own(Trainer):
        def set_initial_training_values(self, args, dataloader, total_train_batch_size):
            seen.append(total_train_batch_size)
            return super().set_initial_training_values(args, dataloader, total_train_batch_size)

    seen = []
    trainer = Own(toy.Classifier(), make_args(gradient_accumulation_steps=2), train_dataset=toy.rows(24))
    assert trainer.train().global_step == 6 and seen == [8]


def test_an_accelerator_of_accelerates_is_replaced_and_its_data_options_count(make_args):
    """As trainers of LLaVA's kind make one."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    class Own(Trainer):
        def create_accelerator_and_postprocess(self):
            self.accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
            self.gather_function = self.accelerator.gather_for_metrics

    with pytest.warns(hf_compat.errors.HfCompatWarning, match=r"makes an Accelerator .*even_batches=False"):
        trainer = Own(toy.Classifier(), make_args(max_steps=2), train_dataset=toy.rows(8))
    assert trainer.args.accelerator_config.even_batches is False
    assert trainer.accelerator.even_batches is False and trainer.train().global_step == 2
