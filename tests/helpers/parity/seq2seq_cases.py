"""Configurations of `Seq2SeqTrainer` that must give the same numbers on both trainers; `cases.py` says what a case is.

Small T5, BART, Marian and encoder-decoder models, made from configurations; sources and targets are numbers.
"""

from __future__ import annotations

import numpy as np
import torch

from helpers import toy
from helpers.parity.cases import CASES, case


def tiny_t5(**options):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **options))


def _sizes() -> dict:
    names = ("layers", "attention_heads", "ffn_dim")
    return {f"{part}_{name}": 2 if name != "ffn_dim" else 32 for part in ("encoder", "decoder") for name in names}


def tiny_bart():
    from transformers import BartConfig, BartForConditionalGeneration

    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 1}
    config = BartConfig(vocab_size=32, d_model=16, max_position_embeddings=32, **tokens, **_sizes())
    config.forced_eos_token_id = None
    return BartForConditionalGeneration(config)


def tiny_marian():
    from transformers import MarianConfig, MarianMTModel

    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(vocab_size=32, d_model=16, max_position_embeddings=32, **tokens, **_sizes()))


def tiny_encoder_decoder():
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(**sizes, intermediate_size=24), BertConfig(**sizes, intermediate_size=24)
    )
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 1
    return EncoderDecoderModel(config=config)


def pairs(count: int = 18, seed: int = 2, longest: int = 8) -> list[dict]:
    """Sources and their reversal, which ends in the end-of-sequence token; lengths differ."""
    found = []
    for sample in toy.sequences(count, seed=seed, vocabulary=28, longest=longest):
        source = [token + 3 for token in sample["input_ids"]]
        found.append({"input_ids": source, "labels": [*source[::-1], 1]})
    return found


def prompts(count: int = 20) -> list[dict]:
    return [{"input_ids": block["input_ids"][:6], "labels": block["input_ids"][:6]} for block in toy.blocks(count)]


def pad_pairs(features: list[dict]) -> dict:
    batch = toy.pad([{"input_ids": feature["input_ids"]} for feature in features])
    targets = [feature["labels"] for feature in features if "labels" in feature]
    if not targets:
        return batch
    longest = max(map(len, targets))
    batch["labels"] = torch.tensor([target + [-100] * (longest - len(target)) for target in targets])
    return batch


def collator_of_transformers(model):
    """As most scripts have it: it pads by a tokenizer, and makes the decoder's inputs of the labels."""
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(toy.tiny_tokenizer(), model=model)


def exact(prediction):
    """Share of targets that were generated, and what the arrays were: their shapes tell how they were filled up."""
    tokens, labels = (part[0] if isinstance(part, tuple) else part for part in tuple(prediction)[:2])
    width = min(tokens.shape[1], labels.shape[1])
    same = (tokens[:, :width] == labels[:, :width]).mean()
    return {"exact": float(same), "rows": len(tokens), "width": tokens.shape[1], "sum": int(np.abs(tokens).sum())}


GENERATE = {"predict_with_generate": True, "generation_max_length": 10}
EVAL = {"eval_strategy": "steps", "eval_steps": 3}
SAVE = {"save_strategy": "steps", "save_steps": 3}
BASE = {
    "model": tiny_t5,
    "train": pairs,
    "eval": lambda: pairs(9, seed=4),
    "extra": lambda api: {"data_collator": pad_pairs, "compute_metrics": exact},
    "classes": ("Seq2SeqTrainer", "Seq2SeqTrainingArguments"),
}


def seq2seq(name: str, args: dict | None = None, **parts) -> None:
    case(f"seq2seq_{name}", {**GENERATE, "num_train_epochs": 1, **(args or {})}, **{**BASE, **parts})


def _found(output):
    return [output.predictions, output.label_ids, output.metrics]


def _evaluate_and_predict(trainer):
    return [trainer.evaluate(), _found(trainer.predict(pairs(7, seed=6)))]


def _without_labels(trainer):
    samples = [{"input_ids": pair["input_ids"]} for pair in pairs(7)]
    return [_found(trainer.predict(samples)), _found(trainer.predict(samples, num_beams=2))]


def _with_keywords(trainer):
    return [
        trainer.evaluate(num_beams=3, max_length=9),
        trainer.evaluate(max_new_tokens=5),
        _found(trainer.predict(pairs(5), num_beams=2, max_length=20, length_penalty=0.5)),
        _found(trainer.predict(pairs(5), metric_key_prefix="other")),
        trainer.evaluate(do_sample=True, top_k=5),
    ]


def _config_object(**options):
    from transformers import GenerationConfig

    return GenerationConfig(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **options)


def _resume(trainer):
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-3")
    return [trainer.evaluate(), _found(trainer.predict(pairs(5)))]


seq2seq("t5", {"gradient_accumulation_steps": 3, **EVAL}, after=_evaluate_and_predict)
seq2seq("bart", EVAL, model=tiny_bart, after=_evaluate_and_predict)
seq2seq("marian_beams", {"generation_num_beams": 3, **EVAL}, model=tiny_marian, after=_evaluate_and_predict)
seq2seq("encoder_decoder", EVAL, model=tiny_encoder_decoder, after=_evaluate_and_predict)
seq2seq(
    "decoder_only",
    EVAL,
    model=toy.tiny_gpt2,
    train=prompts,
    eval=prompts,
    extra=lambda api: {"compute_metrics": exact, "processing_class": toy.tiny_tokenizer()},
)
seq2seq(
    "without_generation",
    {"predict_with_generate": False, **EVAL},
    after=_evaluate_and_predict,
    extra=lambda api: {"data_collator": pad_pairs, "compute_metrics": lambda found: {"sum": float(found[0][0].sum())}},
)
seq2seq("without_metrics", EVAL, extra=lambda api: {"data_collator": pad_pairs}, after=_evaluate_and_predict)
seq2seq("loss_only", {"prediction_loss_only": True, **EVAL}, after=_evaluate_and_predict)
seq2seq("without_labels", {"per_device_eval_batch_size": 3}, after=_without_labels)
seq2seq("keywords", {}, after=_with_keywords)
seq2seq("no_length", {"generation_max_length": None, **EVAL}, after=_evaluate_and_predict)
seq2seq("sortish", {"sortish_sampler": True, "train_sampling_strategy": "group_by_length", **EVAL})
seq2seq(
    "label_smoothing",
    {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, **EVAL},
    model=None,
    extra=lambda api: {
        "model": (model := tiny_t5()),
        "data_collator": collator_of_transformers(model),
        "compute_metrics": exact,
    },
)
seq2seq(
    "collator_of_transformers",
    EVAL,
    model=None,
    extra=lambda api: {
        "model": (model := tiny_bart()),
        "data_collator": collator_of_transformers(model),
        "compute_metrics": exact,
        "processing_class": toy.tiny_tokenizer(),
    },
    after=_evaluate_and_predict,
)
seq2seq("to_cpu", {"eval_accumulation_steps": 2, "per_device_eval_batch_size": 3, **EVAL}, after=_evaluate_and_predict)
seq2seq(
    "not_joined",
    {"eval_do_concat_batches": False, "per_device_eval_batch_size": 4},
    extra=lambda api: {"data_collator": pad_pairs},
    after=_evaluate_and_predict,
)
seq2seq("inputs_and_losses", {"include_for_metrics": ["inputs", "loss"], **EVAL})
seq2seq(
    "longer_than_allowed",
    {"generation_max_length": 4, "per_device_eval_batch_size": 3, **EVAL},
    after=_evaluate_and_predict,
)
seq2seq(
    "several_sets",
    {"eval_strategy": "epoch"},
    eval=lambda: {"a": pairs(9, seed=5), "b": pairs(4, seed=7)},
    after=lambda t: [t.evaluate(), t.evaluate({"c": pairs(5)}, num_beams=2)],
)
seq2seq(
    "best",
    {
        **EVAL,
        **SAVE,
        "load_best_model_at_end": True,
        "metric_for_best_model": "sum",
        "greater_is_better": False,
        "save_total_limit": 1,
    },
    after=_evaluate_and_predict,
)
seq2seq("bf16", {"bf16": True, **EVAL}, after=_evaluate_and_predict)
seq2seq(
    "model_init",
    EVAL,
    model=None,
    extra=lambda api: {
        "model": None,
        "model_init": lambda: tiny_t5(),
        "data_collator": pad_pairs,
        "compute_metrics": exact,
    },
)
seq2seq(
    "config_object",
    EVAL,
    after=_evaluate_and_predict,
    arguments=lambda: {
        "generation_config": _config_object(num_beams=2, max_new_tokens=7),
        "generation_max_length": None,
    },
)
seq2seq(
    "config_and_length",
    EVAL,
    after=_evaluate_and_predict,
    arguments=lambda: {"generation_config": _config_object(num_beams=2, min_length=3, max_length=10)},
)
seq2seq("evaluate_before_training", {}, before=_with_keywords, after=_evaluate_and_predict)
seq2seq(
    "resume",
    {**EVAL, **SAVE, "gradient_accumulation_steps": 2, "num_train_epochs": 2},
    train=lambda: pairs(30),
    after=_resume,
)

SEQ2SEQ = [name for name in CASES if name.startswith("seq2seq_")]
