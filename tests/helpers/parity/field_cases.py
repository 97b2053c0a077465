"""Configurations of fields that no other case sets. `cases.py` says what a case is."""

from __future__ import annotations

from helpers import toy
from helpers.parity.cases import EVAL, LM, TAGS, case


def _with_lengths():
    import datasets

    samples = toy.sequences()
    return datasets.Dataset.from_list([{**s, "words": (7 * i) % 11} for i, s in enumerate(samples)])


case("adam_beta1", {"adam_beta1": 0.7})
case(
    "activation_checkpointing_in_words_of_5",
    {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
    **LM,
)
case("use_cache", {"use_cache": True, **EVAL}, **LM)
case(
    "worker_options",
    {
        "dataloader_num_workers": 1,
        "dataloader_prefetch_factor": 3,
        "dataloader_in_order": False,
        "dataloader_multiprocessing_context": "fork",
    },
)
case(
    "column_of_lengths",
    {"train_sampling_strategy": "group_by_length", "length_column_name": "words", "remove_unused_columns": False},
    **{**TAGS, "train": _with_lengths},
)
case("debug", {"debug": "underflow_overflow"})
case("named_run", {"run_name": "one", "log_level": "error", "do_train": True, "do_eval": True, "do_predict": True})
