"""The table of names that scripts import from transformers 4.x and that are elsewhere in 5.x.

`run` and `check` restore a name that has a new module or a substitute. `migrate` writes the new module. The other names
are in `tools/migration/gone_names.py`. Further tables list overrides of upstream's Trainer that have no effect here.
"""

from __future__ import annotations

import enum
import importlib
import sys
import typing
from collections.abc import Mapping
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
    "transformers.integrations": {"transformers.hyperparameter_search": ("default_hp_search_backend",)},
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
        "transformers.integrations": ("hp_params",),
        "transformers.integrations.deepspeed": ("is_deepspeed_zero3_enabled",),
        "transformers.optimization": ("Adafactor",),
        "transformers.pytorch_utils": ("ALL_LAYERNORM_LAYERS",),
        "transformers.trainer_pt_utils": (
            "distributed_concat", "get_module_class_from_name", "nested_concat", "nested_numpify", "nested_truncate",
        ),
        "transformers.trainer_utils": ("IntervalStrategy",),
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


class ShardedDDPOption(enum.StrEnum):
    """The ways to shard of fairscale, which is gone. Trainers' `sharded_ddp` is None here, so it equals none of them.

    Mirrors:
        `transformers.trainer_utils.ShardedDDPOption`, 4.33.
    """

    SIMPLE = "simple"
    ZERO_DP_2 = "zero_dp_2"
    ZERO_DP_3 = "zero_dp_3"
    OFFLOAD = "offload"
    AUTO_WRAP = "auto_wrap"


# Names of 4.x without a new place, and their substitutes. transformers 5 dropped telemetry, TensorFlow and Flax, and
# requires safetensors. huggingface_hub has two of them.
_STAND_INS: Mapping[str, object] = {
    "EvaluationStrategy": IntervalStrategy,
    "ShardedDDPOption": ShardedDDPOption,
    "get_full_repo_name": lambda model_id, organization=None, token=None: importlib.import_module(
        "huggingface_hub"
    ).get_full_repo_name(model_id, organization=organization, token=token),
    "is_fairscale_available": lambda: False,
    "is_flax_available": lambda: False,
    "is_offline_mode": lambda: bool(importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE),
    "is_safetensors_available": lambda: True,
    "is_tf_available": lambda: False,
    "is_torch_tpu_available": lambda check_device=True: importlib.import_module(
        "transformers.utils"
    ).is_torch_xla_available(check_is_tpu=check_device),
    "send_example_telemetry": lambda *_, **__: None,
}
# The modules that had some of them. Each gets those that it lacks.
_HAD_STAND_INS = (
    "transformers", "transformers.file_utils", "transformers.integrations", "transformers.trainer",
    "transformers.trainer_utils", "transformers.training_args", "transformers.utils", "transformers.utils.hub",
    "transformers.utils.import_utils",
)  # fmt: skip
# Modules whose star import brought these names of `typing` along, up to 4.57.
_HAD_TYPES = (
    "transformers.trainer", "transformers.trainer_callback", "transformers.trainer_pt_utils",
    "transformers.trainer_seq2seq", "transformers.trainer_utils", "transformers.training_args",
)  # fmt: skip
_TYPES = {name: getattr(typing, name) for name in ("Any", "Callable", "Dict", "List", "Optional", "Tuple", "Union")}

_added: list[tuple[ModuleType, str, object]] = []
_aliases: dict[str, ModuleType] = {}


def is_restored(path: str) -> bool:
    """Whether `run` restores a name or module of transformers."""
    module, _, name = path.rpartition(".")
    if path in MOVED_MODULES:
        return True
    if module in _HAD_TYPES and name in _TYPES:
        return True
    return (module in _HAD_STAND_INS and name in _STAND_INS) or MOVED.get(path, "").startswith("transformers.")


def add_former_names(top_levels: list[ModuleType]) -> None:
    """Give modules of transformers the names that this release no longer has.

    Args:
        top_levels: `transformers`, and the objects that code holds under that name.
    """
    homes: dict[str, dict[str, object]] = {place: {**_STAND_INS} for place in _HAD_STAND_INS}
    for old, today in MOVED_MODULES.items():
        if not modules_there((old,)) and (there := modules_there((today,))):
            sys.modules[old] = _aliases[old] = there[0]
            homes["transformers"][old.rpartition(".")[2]] = there[0]
    for place in _HAD_TYPES:
        homes.setdefault(place, {}).update(_TYPES)
    for path, home in MOVED.items():
        place, _, name = path.rpartition(".")
        if home.startswith("transformers."):
            homes.setdefault(place, {}).update(
                (name, getattr(module, name)) for module in modules_there((home,)) if hasattr(module, name)
            )
    for place, names in homes.items():
        for inner in modules_there((place,)):
            for module in top_levels if place == "transformers" else [inner]:
                _add(module, names)


def _add(module: ModuleType, names: Mapping[str, object]) -> None:
    # `hasattr` would load a name, and transformers' own `dir` takes 0.1 s
    there = {*ModuleType.__dir__(module), *vars(module).get("__all__", ())}
    for name in names.keys() - there:
        setattr(module, name, names[name])
        _added.append((module, name, names[name]))


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
_ONE_SEQUENCE_A_DEVICE = "a sequence or a context is never shared between devices here"

_CLIPS = "`accelerator.clip_grad_norm_` looks at meshes itself; set `max_grad_norm`, or override `_clip_grad_norm`"

# Overrides without effect: upstream's method → the reason and the replacement.
REFUSED_OVERRIDES = {
    "_run_epoch": _LIGHTNINGS_LOOP,
    "_prepare_for_training": _LIGHTNINGS_LOOP,
    "_build_accelerator_args": "there is no Accelerator; override `create_accelerator_and_postprocess`, or set the "
    "training arguments",
    "_defer_fsdp_gradient_reduction": "Lightning's strategy reduces gradients at the end of an update",
    "_sync_replicated_trainable_parameters": "parameters that FSDP leaves whole are refused",
    "_has_mixed_mesh_grads": _CLIPS,
    "_mixed_mesh_grad_norm": _CLIPS,
}

# Methods that a release of upstream called, and neither 5.23 nor this Trainer calls → what does their work today.
FORMER_METHODS = {
    "_training_step": "override `training_step`",
    "_prediction_loop": "override `evaluation_loop`",
    "_log": "override `log`",
    "get_optimizers": "override `create_optimizer_and_scheduler`",
    "prediction_loop": "override `evaluation_loop`",
    "_gather_and_numpify": "override `evaluation_loop`, or call `accelerator.gather_for_metrics`",
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
    "_deepspeed_sp_compute_loss": _ONE_SEQUENCE_A_DEVICE + "; call `compute_loss`",
    "_is_attention_mask_causal": _ONE_SEQUENCE_A_DEVICE + ", so that no mask has to be looked at",
    "_save_tpu": "call `save_model`, or override `_save`",
    "num_tokens": "count the tokens of `get_train_dataloader()`",
}
