"""Methods that 4.x called and 5.23 does not. Rotation is called as in 4.57, and the others cause a warning."""

import os
import shutil

import pytest

from helpers import toy
from hf_compat import Trainer, TrainingArguments, set_seed
from hf_compat.errors import AbsentName, HfCompatWarning
from hf_compat.interop.former_names import FORMER_METHODS


def train(folder, kind=Trainer, edit=lambda trainer: None, **arguments):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_total_limit": 2, **arguments}
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    trainer = kind(toy.Classifier(), args, train_dataset=toy.rows(32))
    edit(trainer)
    trainer.train()
    return trainer


def left(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("checkpoint-"))


class KeepsEverySecond(Trainer):
    calls = ()

    def _rotate_checkpoints(self, use_mtime=False, output_dir=None):
        assert os.path.isfile(os.path.join(output_dir, f"checkpoint-{self.state.global_step}", "manifest.json"))
        self.calls = (*self.calls, (use_mtime, os.path.basename(output_dir), self.state.global_step))
        for path in self._sorted_checkpoints(use_mtime=use_mtime, output_dir=output_dir)[:-1]:
            if int(path.rpartition("-")[2]) % 2:
                shutil.rmtree(path)


class NewestGoFirst(Trainer):
    def _sorted_checkpoints(self, output_dir=None, checkpoint_prefix="checkpoint", use_mtime=False):
        return super()._sorted_checkpoints(output_dir, checkpoint_prefix, use_mtime)[::-1]


class Counts(Trainer):
    calls = 0

    def _rotate_checkpoints(self, use_mtime=False, output_dir=None):
        self.calls += 1
        super()._rotate_checkpoints(use_mtime=use_mtime, output_dir=output_dir)


def test_an_override_of_rotation_takes_its_place_after_each_save(tmp_path):
    trainer = train(tmp_path / "out", KeepsEverySecond)
    assert trainer.calls == tuple((True, "out", step) for step in (1, 2, 3, 4))
    assert left(tmp_path / "out") == ["checkpoint-2", "checkpoint-4"]


def test_it_is_called_with_async_save_too(tmp_path):
    with pytest.warns(HfCompatWarning, match="overrides _rotate_checkpoints; checkpoints are not async"):
        trainer = train(tmp_path / "out", KeepsEverySecond, async_save=True)
    assert len(trainer.calls) == 4 and left(tmp_path / "out") == ["checkpoint-2", "checkpoint-4"]


def test_a_function_put_on_the_trainer_takes_its_place(tmp_path):
    seen = []
    train(tmp_path, edit=lambda trainer: setattr(trainer, "_rotate_checkpoints", lambda **given: seen.append(given)))
    assert seen == [{"use_mtime": True, "output_dir": str(tmp_path)}] * 4 and len(left(tmp_path)) == 4


def test_an_override_of_the_order_is_what_rotation_goes_by(tmp_path):
    train(tmp_path, NewestGoFirst)
    assert left(tmp_path) == ["checkpoint-1", "checkpoint-4"]  # the one just written always stays


def test_super_removes_what_the_limit_has_no_room_for(tmp_path):
    trainer = train(tmp_path, Counts)
    assert trainer.calls == 4 and left(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_the_best_stands_just_before_the_newest(tmp_path):
    trainer = train(tmp_path, save_total_limit=None)
    paths = [str(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3, 4)]
    assert trainer._sorted_checkpoints(output_dir=str(tmp_path)) == paths
    trainer.state.best_model_checkpoint = paths[0]
    assert trainer._sorted_checkpoints() == [paths[1], paths[2], paths[0], paths[3]]
    assert trainer._sorted_checkpoints(checkpoint_prefix="other") == []


@pytest.mark.parametrize("name", FORMER_METHODS)
def test_a_method_that_nothing_calls_any_more_is_named(name):
    with pytest.warns(HfCompatWarning, match=f"Own has a method `{name}`, which an older release"):
        type("Own", (Trainer,), {name: lambda self, *args: None})


def test_an_old_evaluate_calls_the_loop_by_its_former_name(make_args):
    """The trainer for question answering in the examples, until 4.57."""

    class Old(Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            loader = self.get_eval_dataloader(eval_dataset)
            return self.prediction_loop(
                loader, description="Evaluation", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )

    old, new = (cls(toy.Classifier(), make_args(), eval_dataset=toy.rows(9)) for cls in (Old, Trainer))
    new.model.load_state_dict(old.model.state_dict())
    found, wanted = old.evaluate(), new.evaluate()
    assert found.num_samples == 9 and found.metrics["eval_loss"] == wanted["eval_loss"]


class StepOf446(Trainer):
    """Has a copy of 4.46's `training_step`, as in scripts."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if self.args.n_gpu > 1:
            loss = loss.mean()
        if self.use_apex or self.do_grad_scaling or self.sharded_ddp is not None:
            raise AssertionError
        self.accelerator.backward(loss)
        return loss.detach() / self.args.gradient_accumulation_steps


def test_a_training_step_copied_from_4_46_trains_the_same_numbers(tmp_path):
    losses = []
    for kind in (Trainer, StepOf446):
        set_seed(0)  # of the model's weights
        history = train(tmp_path / kind.__name__, kind, logging_steps=1).state.log_history
        losses.append([log["loss"] for log in history if "loss" in log])
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("num_tokens", "count the tokens"),
        ("_gather_and_numpify", "gather_for_metrics"),
        ("_align_special_tokens", "set the model's tokens before"),
    ],
)
def test_a_helper_of_4_x_names_what_to_use_instead(make_args, name, way_out):
    with pytest.raises(AbsentName, match=f"(?s)Trainer has no `{name}` here.*{way_out}"):
        getattr(Trainer(toy.Classifier(), make_args()), name)


def test_the_first_process_has_its_names_of_3_x(tmp_path):
    class Second(Trainer):
        def is_world_process_zero(self):
            return False

    trainer = Second(toy.Classifier(), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    assert trainer.is_local_master() and not trainer.is_world_master()
