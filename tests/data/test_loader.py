"""The options that a loader keeps when it is made again for one process, or for a later start."""

import pytest
import torch
import toy
from torch.utils.data import DataLoader

from hf_compat import Trainer
from hf_compat.data.loader import LoaderOptions, skip_first_batches


def test_what_is_skipped_leaves_every_option_as_it_was():
    options = LoaderOptions(
        collate_fn=list,
        num_workers=1,
        timeout=5,
        worker_init_fn=print,
        generator=torch.Generator(),
        prefetch_factor=3,
        in_order=False,
        multiprocessing_context="spawn",
    )
    loader = DataLoader(range(8), batch_size=2, **options.keywords())
    assert LoaderOptions.of(skip_first_batches(loader, 2)) == LoaderOptions.of(loader)
    assert LoaderOptions.of(loader).in_order is False


@pytest.mark.parametrize("in_order", [True, False])
def test_the_trainers_loaders_have_the_arguments_options(make_args, in_order):
    args = make_args(dataloader_in_order=in_order, dataloader_num_workers=1, dataloader_prefetch_factor=4)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(8))
    training, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    for loader in (training, evaluation):
        found = LoaderOptions.of(loader)
        assert (found.in_order, found.num_workers, found.prefetch_factor) == (in_order, 1, 4)
    assert training.worker_init_fn is not None and evaluation.worker_init_fn is None
    own = DataLoader(toy.rows(8), batch_size=2, num_workers=1, in_order=in_order)
    assert trainer.accelerator.prepare(own).in_order is in_order
