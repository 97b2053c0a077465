"""The table of names that scripts import from transformers 4.x and that 5.x lacks.

`run` and `check` restore a name that has a new module or a substitute. `migrate` writes the new module.
All three report the other names. Further tables list overrides of upstream's Trainer that have no effect here.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from hf_compat.hf.enums import IntervalStrategy
from hf_compat.interop.releases import modules_there

# Modules that have moved within transformers.
MOVED_MODULES = {
    "transformers.deepspeed": "transformers.integrations.deepspeed",
    "transformers.file_utils": "transformers.utils",
}
# Names with another name today, wherever in transformers they were.
RENAMED = {"EvaluationStrategy": "IntervalStrategy", "is_torch_tpu_available": "is_torch_xla_available"}
# Former module → present module → names. `migrate` finds names that a module only imported in the installed release.
_MOVED_FROM: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers.modeling_utils": {
        "transformers.configuration_utils": ("PretrainedConfig",),
        "transformers.generation": ("GenerationMixin",),
        "transformers.pytorch_utils": ("Conv1D", "apply_chunking_to_forward", "prune_linear_layer"),
        "transformers.trainer_utils": ("load_sharded_checkpoint",),
    },
    "transformers.tokenization_utils": {
        "transformers.tokenization_utils_base": (
            "BatchEncoding", "EncodedInput", "EncodedInputPair", "PreTokenizedInput", "PreTokenizedInputPair",
            "PreTrainedTokenizerBase", "TextInput", "TextInputPair", "TruncationStrategy",
        ),
        "transformers.utils": ("PaddingStrategy", "TensorType"),
    },
    "transformers.trainer": {
        "transformers.configuration_utils": ("PretrainedConfig",),
        "transformers.optimization": ("Adafactor",),
        "transformers.pytorch_utils": ("ALL_LAYERNORM_LAYERS",),
        "transformers.trainer_pt_utils": (
            "distributed_concat", "get_module_class_from_name", "nested_concat", "nested_numpify",
        ),
        "transformers.utils": ("PushToHubMixin", "is_apex_available", "is_bitsandbytes_available"),
    },
    "transformers.trainer_pt_utils": {"transformers.tokenization_utils_base": ("BatchEncoding",)},
}  # fmt: skip
# Names that another module of transformers, or another package, has today.
MOVED = {
    "transformers.AdamW": "torch.optim",
    "transformers.optimization.AdamW": "torch.optim",
    "transformers.training_args.default_logdir": "transformers.integrations.integration_utils",
    **{
        f"{place}.{name}": home
        for place, homes in _MOVED_FROM.items()
        for home, names in homes.items()
        for name in names
    },
}

_OLD_DATA = "gone in transformers 5; the `datasets` package reads such data"
# Names that are gone without a successor of the same use, with the way out.
GONE = {
    "AutoModelWithLMHead": "gone: AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM, as the model is",
    "AutoModelForVision2Seq": "gone in transformers 5: AutoModelForImageTextToText",
    "DistributedTensorGatherer": "gone in transformers 5: Accelerate's `gather_for_metrics`",
    "SequentialDistributedSampler": "gone in transformers 5: the trainer divides the data by itself",
    "get_tpu_sampler": "gone in transformers 5: the trainer divides the data by itself",
    "nested_xla_mesh_reduce": "gone in transformers 5",
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
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
}


def is_gone(name: str) -> str | None:
    """The way out for a name that transformers 5 lacks, or None if it has the name."""
    if name in GONE:
        return GONE[name]
    if re.match(r"(TF|Flax)[A-Z][a-z]", name):
        return "TensorFlow and Flax are gone in transformers 5"
    return None


def _full_repo_name(model_id: str, organization: str | None = None, token: str | None = None) -> str:
    api = importlib.import_module("huggingface_hub").HfApi(token=token)
    return str(api.get_full_repo_name(model_id=model_id, organization=organization))


def _is_tpu_available(check_device: bool = True) -> bool:
    utils = importlib.import_module("transformers.utils")
    return bool(utils.is_torch_xla_available(check_is_tpu=check_device))


# Functions of 4.x: telemetry that 5.0 dropped, and two that huggingface_hub has now.
_HUB: Mapping[str, Callable[..., object]] = {
    "send_example_telemetry": lambda *_, **__: None,
    "is_offline_mode": lambda: bool(importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE),
    "get_full_repo_name": _full_repo_name,
}
# transformers 5 dropped TensorFlow and Flax, and requires safetensors.
_AVAILABLE: Mapping[str, Callable[..., object]] = {
    "is_flax_available": lambda: False,
    "is_safetensors_available": lambda: True,
    "is_tf_available": lambda: False,
    "is_torch_tpu_available": _is_tpu_available,
}
# Module → substitutes of names without a new module.
_STAND_INS: dict[str, Mapping[str, object]] = {
    "transformers": _AVAILABLE,
    "transformers.file_utils": {**_HUB, **_AVAILABLE},
    "transformers.trainer": {"is_torch_tpu_available": _is_tpu_available},
    "transformers.trainer_utils": {
        "EvaluationStrategy": IntervalStrategy,
        **{name: _AVAILABLE[name] for name in ("is_tf_available", "is_torch_tpu_available")},
    },
    "transformers.training_args": {"EvaluationStrategy": IntervalStrategy},
    "transformers.utils": {**_HUB, **_AVAILABLE},
    "transformers.utils.hub": _HUB,
    "transformers.utils.import_utils": _AVAILABLE,
}

_added: list[tuple[ModuleType, str, object]] = []
_aliases: dict[str, ModuleType] = {}


def is_restored(path: str) -> bool:
    """Whether `run` restores a name or module of transformers."""
    module, _, name = path.rpartition(".")
    if path in MOVED_MODULES or module in MOVED_MODULES:
        return True
    return name in _STAND_INS.get(module, {}) or MOVED.get(path, "").startswith("transformers.")


def account_of(error: BaseException) -> str | None:
    """The way out for a script that failed on a name, a member or a keyword that transformers 5 lacks."""
    text = str(error)
    if isinstance(error, ImportError):
        found = re.search(r"cannot import name '(\w+)' from '(transformers[\w.]*)'", text)
        return None if found is None or (way_out := is_gone(found[1])) is None else f"{found[2]}.{found[1]}: {way_out}."
    kinds = {AttributeError: ("has no attribute", FORMER_MEMBERS), TypeError: ("keyword argument", FORMER_KEYWORDS)}
    words, table = kinds.get(type(error), ("", {}))
    found = re.search(rf"{words} '?(\w+)", text) if table else None
    return None if found is None or found[1] not in table else f"{found[1]}: {table[found[1]]}."


def add_former_names(top_levels: list[ModuleType]) -> None:
    """Give modules of transformers the names that this release no longer has.

    Args:
        top_levels: `transformers`, and the objects that code holds under that name.
    """
    for old, today in MOVED_MODULES.items():
        if not modules_there((old,)) and (there := modules_there((today,))):
            sys.modules[old] = _aliases[old] = there[0]
            for module in top_levels:
                _add(module, {old.rpartition(".")[2]: there[0]})
    homes: dict[str, dict[str, object]] = {}
    for path, home in MOVED.items():
        place, _, name = path.rpartition(".")
        if home.startswith("transformers."):
            homes.setdefault(place, {}).update(
                (name, getattr(module, name)) for module in modules_there((home,)) if hasattr(module, name)
            )
    for place, names in (*_STAND_INS.items(), *homes.items()):
        for inner in modules_there((place,)):
            for module in top_levels if place == "transformers" else [inner]:
                _add(module, names)


def _add(module: ModuleType, names: Mapping[str, object]) -> None:
    for name, value in names.items():
        if name not in dir(module):  # `hasattr` would load it
            setattr(module, name, value)
            _added.append((module, name, value))


def take_former_names_back() -> None:
    """Restore the modules. Values that a script has set under such a name since then stay."""
    while _added:
        module, name, value = _added.pop()
        if vars(module).get(name) is value:
            delattr(module, name)
    while _aliases:
        old, there = _aliases.popitem()
        if sys.modules.get(old) is there:
            del sys.modules[old]


_LIGHTNINGS_LOOP = (
    "Lightning runs the epochs and updates; override `training_step`, `get_batch_samples`, `_inner_training_loop` as a "
    "whole, or use a callback's events"
)
_ONE_MODEL_A_DEVICE = "a tensor, a sequence or a context is never shared between devices here"

# Overrides without effect: upstream's method → the reason and the replacement.
REFUSED_OVERRIDES = {
    "_run_epoch": _LIGHTNINGS_LOOP,
    "_prepare_for_training": _LIGHTNINGS_LOOP,
    "_build_accelerator_args": "there is no Accelerator; override `create_accelerator_and_postprocess`, or set the "
    "training arguments",
    "_defer_fsdp_gradient_reduction": "Lightning's strategy reduces gradients at the end of an update",
    "_sync_replicated_trainable_parameters": _ONE_MODEL_A_DEVICE,
    "_has_mixed_mesh_grads": _ONE_MODEL_A_DEVICE,
    "_mixed_mesh_grad_norm": _ONE_MODEL_A_DEVICE + "; set `max_grad_norm`, or clip in `on_pre_optimizer_step`",
}

# Methods that a release of upstream called, and neither 5.23 nor this Trainer calls → what does their work today.
FORMER_METHODS = {
    "_training_step": "override `training_step`",
    "_prediction_loop": "override `evaluation_loop`",
    "_log": "override `log`",
    "get_optimizers": "override `create_optimizer_and_scheduler`",
    "prediction_loop": "override `evaluation_loop`",
    "_gather_and_numpify": "override `evaluation_loop`, or use `preprocess_logits_for_metrics`",
    "_align_special_tokens": "set the model's tokens before it is given to the Trainer",
    "_activate_neftune": "leave `neftune_noise_alpha` out, and put a hook on the embeddings in `on_train_begin`",
    "_deactivate_neftune": "leave `neftune_noise_alpha` out, and take the hook off in `on_train_end`",
    "compare_trainer_and_checkpoint_args": "compare them in `on_train_begin`",
    "propagate_args_to_deepspeed": "set the arguments `deepspeed` and `per_device_train_batch_size`",
    "_fsdp_qlora_plugin_updates": "set the argument `fsdp_config`",
    "ipex_optimize_model": "prepare the model before it is given to the Trainer",
    "torch_jit_model_eval": "prepare the model before it is given to the Trainer",
}

# Names of upstream's Trainer that scripts rarely override and that have no effect here → the way out.
ABSENT = {
    "_add_sm_patterns_to_gitignore": "leave it out: `push_to_hub` pushes checkpoints and the model alone",
    "_deepspeed_sp_compute_loss": _ONE_MODEL_A_DEVICE + "; call `compute_loss`",
    "_is_attention_mask_causal": _ONE_MODEL_A_DEVICE + ", so that no mask has to be looked at",
    "_save_tpu": "call `save_model`, or override `_save`",
}
