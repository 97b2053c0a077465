"""The names, members and keywords of transformers 4.x that 5.x lacks, with the way out.

`migrate` reports them. `run` adds the way out to the error of a script that failed on one.
"""

from __future__ import annotations

import re

_OLD_DATA = "gone in transformers 5; the `datasets` package reads such data"
# Names that are gone without a successor of the same use, with the way out.
GONE = {
    "AutoModelWithLMHead": "gone: AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM, as the model is",
    "AutoModelForVision2Seq": "gone in transformers 5: AutoModelForImageTextToText",
    "DistributedTensorGatherer": "gone in transformers 5: Accelerate's `gather_for_metrics`",
    "SequentialDistributedSampler": "gone in transformers 5: the trainer divides the data by itself",
    "get_tpu_sampler": "gone in transformers 5: the trainer divides the data by itself",
    "nested_xla_mesh_reduce": "gone in transformers 5",
    "default_hp_space": "gone since 4.31: `default_hp_space_optuna`, `default_hp_space_ray`, or no `hp_space` at all",
    "default_hp_space_sigopt": "gone in transformers 5, as SigOpt is",
    "distributed_broadcast_scalars": "gone from `transformers.trainer`: it is in `transformers.trainer_pt_utils`",
    "TFTrainer": "TensorFlow is gone in transformers 5",
    "TFTrainingArguments": "TensorFlow is gone in transformers 5",
    "is_tf_available": "TensorFlow is gone in transformers 5",
    "create_optimizer": "TensorFlow is gone in transformers 5",
    "is_flax_available": "Flax is gone in transformers 5",
    "is_offline_mode": "gone in transformers 5: `huggingface_hub.is_offline_mode`",
    "get_full_repo_name": "gone in transformers 5: `huggingface_hub.HfApi().get_full_repo_name`",
    "send_example_telemetry": "gone in transformers 5, where nothing is sent: take the call out",
    "AdamW": "gone since 4.50: `torch.optim.AdamW`, which differs in the last digits (`migrate` writes it)",
    "SpecialTokensMixin": "gone in transformers 5: its methods are those of `PreTrainedTokenizerBase`",
    "DataCollatorForWholeWordMask": "gone in transformers 5: `DataCollatorForLanguageModeling(whole_word_mask=True)`",
    "find_pruneable_heads_and_indices": "gone in transformers 5, as the pruning of heads is: copy it into the script",
    "top_k_top_p_filtering": "gone since 4.39: `TopKLogitsWarper` and `TopPLogitsWarper`",
    "Conversation": "gone since 4.42: pipelines take lists of messages",
    "LogitsWarper": "gone in transformers 5: `LogitsProcessor`",
    "is_safetensors_available": "gone in transformers 5: always true",
    "is_ipex_available": "gone in transformers 5, as Intel's extension is",
    "cached_property": "gone in transformers 5: `functools.cached_property`",
    "torch_required": "gone in transformers 5, which always has torch: take the line out",
    "TRANSFORMERS_CACHE": "gone in transformers 5: `huggingface_hub.constants.HF_HUB_CACHE`",
    **dict.fromkeys(
        (
            "DataCollatorForSOP", "DataProcessor", "GlueDataTrainingArguments", "GlueDataset", "InputExample",
            "InputFeatures", "LineByLineTextDataset", "LineByLineWithRefDataset", "LineByLineWithSOPTextDataset",
            "SquadDataTrainingArguments", "SquadDataset", "SquadV1Processor", "SquadV2Processor", "TextDataset",
            "TextDatasetForNextSentencePrediction", "glue_compute_metrics", "glue_convert_examples_to_features",
            "glue_output_modes", "glue_processors", "glue_tasks_num_labels", "squad_convert_examples_to_features",
            "xnli_compute_metrics", "xnli_processors",
        ),
        _OLD_DATA,
    ),
}  # fmt: skip

_TODAYS_LISTS = "gone in transformers 5: `extra_special_tokens` and `extra_special_tokens_ids`"
_OF_PYTHON = "gone from fast tokenizers in transformers 5: call the tokenizer with the texts"
_PRUNING = "gone in transformers 5, as the pruning of heads is"
_DEVICES = 'gone in transformers 5: `from_pretrained(…, device_map="auto")`'
_MASKS = "gone in transformers 5: `transformers.masking_utils`"
_CACHES = "gone in transformers 5: `DynamicCache` is the only form"
_MEMORY_HOOKS = "gone in transformers 5"
# Members of tokenizers, processors and models that are gone, with the way out.
FORMER_MEMBERS = {
    "as_target_tokenizer": "gone in transformers 5: `tokenizer(text_target=…)`",
    "as_target_processor": "gone in transformers 5: `processor(text=…)`",
    "prepare_seq2seq_batch": "gone in transformers 5: `tokenizer(…, text_target=…)`",
    "encode_plus": "gone in transformers 5: call the tokenizer; a list of words needs is_split_into_words=True",
    "batch_encode_plus": "gone in transformers 5: call the tokenizer",
    "build_inputs_with_special_tokens": _OF_PYTHON,
    "create_token_type_ids_from_sequences": _OF_PYTHON,
    "prepare_for_model": _OF_PYTHON,
    "truncate_sequences": _OF_PYTHON,
    "additional_special_tokens": _TODAYS_LISTS,
    "additional_special_tokens_ids": _TODAYS_LISTS,
    "all_special_tokens_extended": "gone in transformers 5: `added_tokens_decoder`",
    "special_tokens_map_extended": "gone in transformers 5: `special_tokens_map`",
    "sanitize_special_tokens": "gone in transformers 5, which has nothing to sanitize",
    "get_head_mask": _PRUNING,
    "prune_heads": _PRUNING,
    "parallelize": _DEVICES,
    "deparallelize": _DEVICES,
    "to_bettertransformer": 'gone in transformers 5: `attn_implementation="sdpa"`',
    "reverse_bettertransformer": 'gone in transformers 5: `attn_implementation="sdpa"`',
    "freeze_feature_extractor": "gone in transformers 5: `freeze_feature_encoder`",
    "from_legacy_cache": _CACHES,
    "to_legacy_cache": _CACHES,
    "from_text_vision_configs": "gone in transformers 5: `text_config=` and `vision_config=` of the class",
    "add_memory_hooks": _MEMORY_HOOKS,
    "reset_memory_hooks_state": _MEMORY_HOOKS,
    "get_extended_attention_mask": _MASKS,
    "invert_attention_mask": _MASKS,
    "warnings_issued": "gone in transformers 5: take the line out",
}
# Settings of generation that 4.x read from a model's configuration, too.
OF_GENERATION = frozenset(
    {
        "bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "forced_bos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
        "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "temperature", "top_k", "top_p",
        "typical_p",
    }
)  # fmt: skip
_QUANTIZED = "gone in transformers 5: `quantization_config=BitsAndBytesConfig(…)`"
# Keywords of `from_pretrained` that a model no longer takes, with the way out.
FORMER_KEYWORDS = {
    "use_auth_token": "is token today",
    "resume_download": "gone in transformers 5, which always resumes a download",
    "use_flash_attention_2": 'is attn_implementation="flash_attention_2" today',
    "gradient_checkpointing": "gone since 4.11: an argument of the training",
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
}

_READ_SAFELY = "a configuration of transformers 5 has it only if its class or its file does: `getattr(config, …, None)`"
# Settings of configurations whose reading failed in no release of 4.x, with the way out.
FORMER_SETTINGS = {
    "rope_theta": 'gone in transformers 5: `config.rope_parameters["rope_theta"]`',
    **dict.fromkeys(
        (
            "cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task", "is_decoder",
            "position_embedding_type", "pruned_heads", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
            "torchscript", "use_bfloat16",
        ),
        _READ_SAFELY,
    ),
}  # fmt: skip
# Those that had an effect in 4.x, and that transformers 5 keeps as attributes and reads nowhere.
WITHOUT_EFFECT = {
    "rope_theta": 'transformers 5 reads `config.rope_parameters["rope_theta"]` alone',
    "position_embedding_type": "gone in transformers 5: positions are absolute",
    "tie_encoder_decoder": "gone in transformers 5: encoder and decoder have weights of their own",
    "pruned_heads": _PRUNING,
}
# Words that `from_pretrained` of a model took for its configuration, and that are a TypeError in transformers 5.
REFUSED_SETTINGS = (frozenset(FORMER_SETTINGS) - {"decoder_start_token_id", "is_decoder"}) | OF_GENERATION

# Names of torch that are gone, and functions that only raise today, with the way out.
GONE_OF_TORCH = {
    "torch._six": "Python's own names, such as `math.inf` and `str`",
    "torch.distributed.pipeline": "`torch.distributed.pipelining`",
    "torch.optim.lr_scheduler.SAVE_STATE_WARNING": "nothing takes its place, as nothing warns",
    "torch.set_deterministic": "`torch.use_deterministic_algorithms`",
    "torch.is_deterministic": "`torch.are_deterministic_algorithms_enabled`",
    "torch.storage._TypedStorage": "`torch.storage.TypedStorage`",
    "torch.rfft": "`torch.fft.rfft`",
    "torch.irfft": "`torch.fft.irfft`",
    "torch.ifft": "`torch.fft.ifft`",
    "torch.symeig": "`torch.linalg.eigh`",
    "torch.eig": "`torch.linalg.eig`",
    "torch.solve": "`torch.linalg.solve`, with the arguments in the other order",
    "torch.lstsq": "`torch.linalg.lstsq`, with the arguments in the other order",
    "torch.matrix_rank": "`torch.linalg.matrix_rank`",
    "torch.utils.ffi": "nothing takes its place",
    "torch.nn.functional.nll_loss2d": "`torch.nn.functional.nll_loss`",
    **{
        f"torch.utils.data.{one}.T_co": "`TypeVar` makes one"
        for one in ("dataloader", "dataset", "distributed", "sampler")
    },
}

OF_POST_INIT = "`__init__` of a model ends with `self.post_init()` in transformers 5"
# Files of weights that nothing writes by default any longer, with those in their place.
FORMER_FILES = {
    "adapter_model.bin": "PEFT writes `adapter_model.safetensors`",
    "pytorch_model.bin": "transformers writes `model.safetensors`",
}


def is_gone(name: str) -> str | None:
    """The way out for a name that transformers 5 lacks, or None if it has the name."""
    if name in GONE:
        return GONE[name]
    if re.match(r"(TF|Flax)[A-Z][a-z]", name):
        return "TensorFlow and Flax are gone in transformers 5"
    return None


def account_of(error: BaseException) -> str | None:
    """The way out for a script that failed on a name, a member or a keyword that transformers 5 lacks."""
    text = str(error)
    module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if re.fullmatch(r"transformers\.(configuration|modeling|tokenization)_\w+", module):
        return f"{module}: gone since 4.0: import its names from `transformers`."
    if isinstance(error, ImportError):
        found = re.search(r"cannot import name '(\w+)' from '(transformers[\w.]*)'", text)
        if found is None:
            return None
        from hf_compat.tools.migration.names import find  # which reads this table
        from hf_compat.tools.migration.report import Target

        name, module = found.groups()
        place = find(module, name, Target.HF_COMPAT)
        return f"{module}.{name}: {place.reason or f'`from {place.module} import {place.name}` finds it today'}."
    members = {**FORMER_MEMBERS, "all_tied_weights_keys": OF_POST_INIT}
    kinds = {AttributeError: ("has no attribute", members), TypeError: ("keyword argument", FORMER_KEYWORDS)}
    words, table = kinds.get(type(error), ("", {}))
    found = re.search(rf"{words} '?(\w+)", text) if table else None
    return None if found is None or found[1] not in table else f"{found[1]}: {table[found[1]]}."
