"""`Seq2SeqTrainingArguments`: the five fields that HF adds for models that generate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hf_compat.hf import argument_values as values
from hf_compat.hf.argument_values import ArgumentCheck, ArgumentValue, Row, checks_of
from hf_compat.hf.arguments import TrainingArguments, _arg, declare

# A `transformers.GenerationConfig`; transformers may be absent when command lines are made from these hints.
GenerationOptions: TypeAlias = Any


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """How to train, evaluate and save a model that is evaluated on what it generates.

    Raises:
        ArgumentError: A value, or a combination of values, that cannot work (a `ValueError`).

    Mirrors:
        `transformers.Seq2SeqTrainingArguments`, 5.23: names, order, defaults.

    Differs:
        `generation_config` may also be a dict of options, or its JSON. `sortish_sampler` changes nothing, as in
        transformers, and says so.

    Examples:
        >>> args = Seq2SeqTrainingArguments("out", predict_with_generate=True, generation_num_beams=4, use_cpu=True)
        >>> args.to_dict()["generation_num_beams"]
        4
    """

    # fmt: off
    sortish_sampler: bool = _arg(
        False, "Sort samples by length, roughly; `train_sampling_strategy` does that today.", Row(
        "nothing", "nothing",
        inert="transformers has no such sampler; `train_sampling_strategy='group_by_length'` sorts by length"))
    predict_with_generate: bool = _arg(False, "Evaluate and predict on what the model generates (ROUGE, BLEU).", Row(
        "`generate` in evaluations and predictions", "taken"))
    generation_max_length: int | None = _arg(None, "`max_length` of generations; None is the model's own.", Row(
        "`max_length` of `generate` in evaluations and predictions", "taken", allowed=values.COUNT))
    generation_num_beams: int | None = _arg(None, "`num_beams` of generations; None is the model's own.", Row(
        "`num_beams` of `generate` in evaluations and predictions", "taken", allowed=values.COUNT))
    generation_config: str | Path | GenerationOptions | None = _arg(
        None, "Generation options: a model's name, a folder, a JSON file, or an object.", Row(
        "model.generation_config", "taken", kind=values.GENERATION_CONFIG))
    # fmt: on

    @classmethod
    def _checks(cls) -> Mapping[str, ArgumentCheck]:
        return checks_of(cls, Seq2SeqTrainingArguments)

    def to_dict(self) -> dict[str, ArgumentValue]:
        """Return the fields as plain values; a generation config becomes its dict, a path its text.

        Mirrors:
            `transformers.Seq2SeqTrainingArguments.to_dict`, 5.23.
        """
        values = super().to_dict()
        config = values["generation_config"]
        if callable(getattr(config, "to_dict", None)):
            values["generation_config"] = config.to_dict()
        elif isinstance(config, os.PathLike):
            values["generation_config"] = os.fspath(config)
        return values


declare(Seq2SeqTrainingArguments)
