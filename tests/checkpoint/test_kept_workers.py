"""With persistent workers a resumed run draws what the uninterrupted one draws, which began its workers once."""

from __future__ import annotations

import pytest
import torch

from helpers import toy
from hf_compat import Trainer, set_seed
from hf_compat.data.loader import PreparedDataLoader

UPDATES = 13  # two epochs and a half, of five updates each
DATA = {
    "rows": lambda: toy.rows(20),
    "a stream that is told of its epoch": lambda: toy.ShuffledStream(toy.rows(20)),  # which kept workers never hear of
}


def train(make_args, folder, data, checkpoint=None, **more):
    args = make_args(
        output_dir=str(folder), max_steps=UPDATES, save_strategy="steps", save_steps=1, logging_steps=1,
        eval_strategy="steps", eval_steps=4,
        **{"dataloader_num_workers": 1, "dataloader_persistent_workers": True,
           "accelerator_config": {"use_seedable_sampler": False}, **more},
    )  # fmt: skip
    set_seed(3)
    sets = {"a": toy.rows(9, 5), "b": toy.Stream(toy.rows(6, 6))}
    trainer = Trainer(toy.Classifier(), args, train_dataset=DATA[data](), eval_dataset=sets)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    log = [{k: v for k, v in entry.items() if k in ("loss", "eval_a_loss", "eval_b_loss", "step")} for entry in
           trainer.state.log_history]  # fmt: skip
    return log[:-1], [value.tolist() for value in trainer.model.state_dict().values()], torch.rand(1).item()


# before an evaluation, at an epoch's end; after an evaluation, within the second epoch
@pytest.mark.parametrize(
    ("data", "steps"),
    [
        pytest.param("rows", (3, 5), marks=pytest.mark.matrix),
        ("a stream that is told of its epoch", (4, 7)),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(make_args, tmp_path, data, steps, caplog):
    whole = train(make_args, tmp_path / "out", data)
    for step in steps:
        caplog.clear()
        found = train(make_args, tmp_path / f"at{step}", data, tmp_path / "out" / f"checkpoint-{step}")
        assert found == whole, step
        assert ("draws or keeps within a worker begins anew" in caplog.text) == (step > 3)


SETTINGS = {
    "kept no more": ("rows", {"dataloader_persistent_workers": False}, "dataloader_persistent_workers=False", "True"),
    "more workers of a stream": (
        "a stream that is told of its epoch",
        {"dataloader_num_workers": 2},
        "dataloader_num_workers=2",
        "1",
    ),
}


@pytest.mark.parametrize(
    ("data", "changed", "setting", "before"),
    [
        pytest.param(*row, id=name, marks=[pytest.mark.matrix] * (name == "more workers of a stream"))
        for name, row in SETTINGS.items()
    ],
)
def test_a_changed_setting_that_changes_the_run_is_named(make_args, tmp_path, data, changed, setting, before, caplog):
    whole = train(make_args, tmp_path / "out", data)
    caplog.clear()
    found = train(make_args, tmp_path / "again", data, tmp_path / "out" / "checkpoint-7", **changed)
    assert found != whole
    assert f"`{setting}`, in the interrupted run {before}: " in caplog.text


@pytest.mark.matrix  # test_resumer.py has the table of what is said
def test_a_changed_setting_that_changes_nothing_is_not_named(make_args, tmp_path, caplog):
    none = {"dataloader_num_workers": 0, "dataloader_persistent_workers": False}
    one = {"dataloader_num_workers": 1, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": 3}
    whole = train(make_args, tmp_path / "out", "rows", **none)
    found = train(make_args, tmp_path / "again", "rows", tmp_path / "out" / "checkpoint-7", **one)
    assert found == whole and "in the interrupted run" not in caplog.text


class Draws(torch.utils.data.Dataset):
    """Draws its samples within the worker, as a random crop is."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.rand(1)


def test_new_workers_do_not_repeat_what_those_of_another_seed_or_epoch_drew():
    def drawn(seed, epoch):
        torch.manual_seed(seed)
        loader = PreparedDataLoader(Draws(), num_workers=1, persistent_workers=True)
        loader.replaces_workers, loader.iteration = True, epoch
        state = torch.get_rng_state()
        found = [float(batch) for batch in loader]
        assert torch.equal(torch.get_rng_state(), state)
        return found

    first = drawn(1, 2)
    assert first == drawn(1, 2)
    assert not set(first) & {*drawn(2, 2), *drawn(1, 3)}
