"""`Seq2SeqTrainer`: names, refusals and warnings. tests/helpers/parity/seq2seq_cases.py compares its numbers."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import sys

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from helpers.parity import seq2seq_cases as cases
from hf_compat import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, InertArgumentWarning, MissingPackage
from hf_compat.hf.rows import ROWS

QUIET = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}


def arguments(folder, **chosen):
    return Seq2SeqTrainingArguments(str(folder), **{**QUIET, "predict_with_generate": True, **chosen})


def made(folder, model=None, args=None, **chosen):
    parts = {"data_collator": cases.pad_pairs, "eval_dataset": cases.pairs(3), "train_dataset": cases.pairs(4)}
    return Seq2SeqTrainer(model or cases.tiny_t5(), args or arguments(folder, **chosen), **parts)


def test_fields_and_defaults_are_upstreams():
    ours, theirs = (
        [(field.name, field.default) for field in dataclasses.fields(package.Seq2SeqTrainingArguments)]
        for package in (hf_compat, transformers)
    )
    plain = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert [one for one in ours if one[0] not in plain] == [one for one in theirs if one[0] not in plain]
    assert issubclass(Seq2SeqTrainer, Trainer) and issubclass(Seq2SeqTrainingArguments, TrainingArguments)


def test_methods_have_upstreams_signatures():
    theirs = transformers.Seq2SeqTrainer
    for name in ("evaluate", "predict", "prediction_step", "load_generation_config", "_pad_tensors_to_max_len"):
        ours, upstream = (inspect.signature(getattr(one, name)).parameters for one in (Seq2SeqTrainer, theirs))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in upstream.values()
        ]
    ours, upstream = (inspect.signature(one.__init__).parameters for one in (Seq2SeqTrainer, theirs))
    assert list(ours)[: len(upstream)] == list(upstream)


def test_they_stand_where_scripts_import_them_from():
    from hf_compat.trainer_seq2seq import Seq2SeqTrainer as Same
    from hf_compat.trainer_seq2seq import Trainer as SamePlain
    from hf_compat.trainer_seq2seq import deepcopy
    from hf_compat.training_args_seq2seq import GenerationConfig
    from hf_compat.training_args_seq2seq import Seq2SeqTrainingArguments as SameArguments

    assert Same is Seq2SeqTrainer and SamePlain is Trainer and SameArguments is Seq2SeqTrainingArguments
    assert GenerationConfig is transformers.GenerationConfig and callable(deepcopy)


def test_a_command_line(tmp_path):
    words = ["--output_dir", str(tmp_path), "--predict_with_generate", "--generation_num_beams", "4", "--use_cpu"]
    words += ["--generation_config", "some/name", "--sortish_sampler", "false", "--evaluation_strategy", "no"]
    (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
    assert args.predict_with_generate is True and args.generation_num_beams == 4 and args.sortish_sampler is False
    assert str(args.generation_config) == "some/name" and args.generation_max_length is None
    (theirs,) = transformers.HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(words[:-2])
    assert type(theirs) is Seq2SeqTrainingArguments and theirs.generation_num_beams == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation_max_length", 0),
        ("generation_max_length", "long"),
        ("generation_num_beams", -1),
        ("generation_num_beams", 1.5),
        ("predict_with_generate", "perhaps"),
        ("generation_config", 3),
        ("generation_config", ["a"]),
    ],
)
def test_values_that_cannot_work(tmp_path, name, value):
    with pytest.raises(ArgumentError, match=name):
        arguments(tmp_path, **{name: value})
    args = arguments(tmp_path)
    with pytest.raises(ArgumentError, match=name):
        setattr(args, name, value)


def test_an_argument_of_the_other_class_says_where_it_is(tmp_path):
    added = {f.name for f in dataclasses.fields(Seq2SeqTrainingArguments)}
    added -= {f.name for f in dataclasses.fields(TrainingArguments)}
    assert list(ROWS)[-len(added) :] == [f.name for f in dataclasses.fields(Seq2SeqTrainingArguments)][-len(added) :]
    for name in added:
        with pytest.raises(TypeError, match="one of `Seq2SeqTrainingArguments`"):
            TrainingArguments(str(tmp_path), **{name: None})


def test_dumps_hold_plain_values(tmp_path):
    config = transformers.GenerationConfig(num_beams=3, max_new_tokens=7)
    ours, theirs = (
        package.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, generation_config=config).to_dict()
        for package in (hf_compat, transformers)
    )
    assert ours["generation_config"] == theirs["generation_config"] == config.to_dict()
    args = arguments(tmp_path, generation_config=config, generation_num_beams="2")
    assert json.loads(args.to_json_string())["generation_config"]["num_beams"] == 3
    assert arguments(tmp_path, generation_config=tmp_path).to_dict()["generation_config"] == str(tmp_path)
    assert pickle.loads(pickle.dumps(args)).generation_config.max_new_tokens == 7
    assert args.generation_num_beams == 2 and "generation_num_beams=2" in str(args)


def test_transformers_own_arguments_are_taken_as_they_are(tmp_path):
    theirs = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), **QUIET, predict_with_generate=True, generation_max_length=6, generation_num_beams=2
    )
    trainer = made(tmp_path, args=theirs)
    assert trainer.args is theirs and isinstance(theirs, Seq2SeqTrainingArguments)
    assert isinstance(theirs, transformers.Seq2SeqTrainingArguments)
    theirs.generation_num_beams = 3  # edits count
    trainer.evaluate()
    assert trainer._gen_kwargs == {"max_length": 6, "num_beams": 3}
    assert theirs.to_dict()["generation_num_beams"] == 3
    with pytest.raises(ArgumentError, match="generation_num_beams"):
        theirs.generation_num_beams = 0


def test_arguments_without_those_of_generation(tmp_path):
    with pytest.raises(ArgumentError, match="pass `Seq2SeqTrainingArguments`"):
        made(tmp_path, args=TrainingArguments(str(tmp_path), **QUIET))
    assert type(Seq2SeqTrainer(cases.tiny_t5()).args) is Seq2SeqTrainingArguments


def test_a_model_that_does_not_generate(tmp_path):
    with pytest.raises(ArgumentError, match="Classifier has no method `generate`"):
        made(tmp_path, model=toy.Classifier())
    made(tmp_path, model=toy.Classifier(), predict_with_generate=False)

    class OwnStep(Seq2SeqTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
            return torch.zeros(()), torch.zeros(len(inputs["x"]), 2), inputs["labels"]

    trainer = OwnStep(toy.Classifier(), arguments(tmp_path))
    assert trainer.predict(toy.rows(3)).predictions.shape == (3, 2)


def test_generation_without_transformers_is_refused_at_once(tmp_path, monkeypatch):
    model = cases.tiny_t5()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackage, match=r"predict_with_generate=True(.|\n)*pip install 'transformers>="):
        made(tmp_path, model)


def test_generation_configs_of_all_kinds(tmp_path):
    options = {"num_beams": 3, "max_new_tokens": 5, "decoder_start_token_id": 0}
    config = transformers.GenerationConfig(**options)
    config.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "generation_config.json"
    for source in (config, options, json.dumps(options), tmp_path / "saved", str(tmp_path / "saved"), file, str(file)):
        trainer = made(tmp_path, generation_config=source)
        found = trainer.model.generation_config
        assert (found.num_beams, found.max_new_tokens, found.decoder_start_token_id) == (3, 5, 0), source
        assert found is not config
    assert made(tmp_path, generation_config="").model.generation_config.num_beams in (None, 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/to/be/found", "cannot be used"),
        ({"num_beams": 1, "temperature": 0.5}, "Fix these issues to train your model"),
    ],
)
def test_generation_configs_that_cannot_work(tmp_path, source, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        made(tmp_path, generation_config=source)
    assert "generation_config" in str(caught.value)


def test_what_has_no_effect_says_so(tmp_path):
    with pytest.warns(InertArgumentWarning, match="sortish_sampler.*group_by_length"):
        made(tmp_path, sortish_sampler=True, max_steps=1).train()
    trainer = made(tmp_path, predict_with_generate=False)
    trainer.evaluate(max_length=None)  # as scripts pass on arguments that are not set
    with pytest.warns(InertArgumentWarning, match="num_beams=2.*predict_with_generate"):
        trainer.evaluate(max_length=None, num_beams=2)


def test_a_plain_trainer_does_not_generate(tmp_path):
    with pytest.warns(InertArgumentWarning, match="`predict_with_generate=True`.*a Trainer does not generate"):
        Trainer(
            cases.tiny_t5(), arguments(tmp_path), data_collator=cases.pad_pairs, eval_dataset=cases.pairs(2)
        ).evaluate()


def test_no_padding_token(tmp_path):
    trainer = Seq2SeqTrainer(toy.tiny_gpt2(), arguments(tmp_path, generation_max_length=9))
    with pytest.raises(ArgumentError, match="Pad_token_id must be set"):
        trainer.predict(cases.prompts(3))
    trainer.model.config.pad_token_id = 5
    assert trainer.predict(cases.prompts(3)).label_ids[:, 6:].tolist() == [[5] * 14] * 3  # of the config's length, 20


def test_subclasses_reach_upstreams_parts(tmp_path):
    """Metrics over two kinds of generations call the step separately, and override the padding."""

    class Both(Seq2SeqTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
            found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, max_new_tokens=3)
            assert found[1].shape == super().prediction_step(model, inputs, prediction_loss_only, num_beams=2)[1].shape
            return found

        def _pad_tensors_to_max_len(self, tensor, max_length):
            return torch.nn.functional.pad(tensor, (0, max_length - tensor.shape[1]), value=31)

    trainer = Both(cases.tiny_t5(), arguments(tmp_path), data_collator=cases.pad_pairs)
    output = trainer.predict(cases.pairs(3))
    assert output.predictions.shape == output.label_ids.shape == (3, 20)
    assert (output.predictions[:, 4:] == 31).all()
