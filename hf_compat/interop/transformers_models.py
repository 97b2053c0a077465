"""Recognise and use objects of `transformers` and `peft` without importing either package first.

They are models, tokenizers, data sets, generation configs and callbacks. Liger's kernels are here, too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from hf_compat.errors import ArgumentError, MissingPackage, UnsupportedArgument, warn_once
from hf_compat.hf.callbacks import EVENTS, TrainerCallback
from hf_compat.interop.mirrors import rebuilt_with_base
from hf_compat.interop.releases import check_quantization, of_installed
from hf_compat.runtime.console import in_notebook
from hf_compat.runtime.text import brief, did_you_mean, is_installed, missing_package, shown


def _one_of(*paths: str) -> Callable[[object], bool]:
    """Make a test whether an object is an instance of one of these classes, as far as their modules are imported."""
    places = [path.rsplit(".", 1) for path in paths]

    def is_one(candidate: object) -> bool:
        for module, name in places:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and isinstance(candidate, kind):
                return True
        return False

    return is_one


is_peft_model = _one_of("peft.PeftModel", "peft.PeftMixedModel")
# The modules that define them: transformers' top level would import these where it is asked
_MODEL = "transformers.modeling_utils.PreTrainedModel"
_TOKENIZER = "transformers.tokenization_utils_base.PreTrainedTokenizerBase"
is_transformers_model = _one_of(_MODEL)
# which saves itself
is_pretrained_model = _one_of(_MODEL, "peft.PeftModel", "peft.PeftMixedModel")
is_datasets_dataset = _one_of("datasets.Dataset")
is_datasets_stream = _one_of("datasets.IterableDataset")  # which knows its shards
# a sampler that yields only this rank's batches
knows_its_rank = _one_of("transformers.trainer_pt_utils.BatchRebalanceSampler")
_is_padding = _one_of(_TOKENIZER, "transformers.feature_extraction_sequence_utils.SequenceFeatureExtractor")
_has_tokens = _one_of(_TOKENIZER, "transformers.processing_utils.ProcessorMixin")


def takes_loss_keywords(model: nn.Module) -> bool | None:
    """Whether a model's forward takes the items of an update, if its release shows that by a parameter's name.

    Up to 4.46 the name is `**loss_kwargs`. Models with other keywords (`EncoderDecoderModel`) pass them to modules that
    do not know `num_items_in_batch`.

    Returns:
        None if the release has no such rule, or if the model is not one of transformers.
    """
    utils = sys.modules.get("transformers.utils") if is_transformers_model(model) else None
    if utils is None or hasattr(utils, "TransformersKwargs") or hasattr(utils, "LossKwargs"):
        return None
    return "loss_kwargs" in inspect.signature(model.forward).parameters


def as_held(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the weights of a model's files to the names and forms of the model's parameters.

    Since 5.0 some models of transformers have other parameters than their files. GPT-NeoX has another name for its
    head, and mixtures of experts have one tensor for all experts of a layer. `from_pretrained` reads such files.
    Other models get the weights unchanged.

    Differs:
        `transformers.Trainer`, does not load these parameters when it resumes or loads the best model.
    """
    mappings = sys.modules.get("transformers.conversion_mapping")
    if mappings is None or not is_transformers_model(model):
        return weights
    own = {name.replace("_orig_mod.", "") for name in model.state_dict()}
    if not (own - weights.keys() and weights.keys() - own):
        return weights
    if not mappings.get_model_conversion_mapping(model, add_legacy=False):
        return weights
    kind = next((kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")), None)
    if kind is None:
        return weights
    with torch.random.fork_rng(devices=[]):  # it fills missing weights with random numbers
        held, told = kind.from_pretrained(  # type: ignore[attr-defined]  # of a PreTrainedModel
            None, config=model.config, state_dict=dict(weights), output_loading_info=True
        )
    missing, unknown = set(told["missing_keys"]), set(told["unexpected_keys"])
    read = {name: tensor for name, tensor in held.state_dict().items() if name not in missing}
    return {**read, **{name: tensor for name, tensor in weights.items() if name in unknown}}


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Unwrap a model from `peft`'s wrapper, if it has one."""
    if not is_peft_model(model):
        return model
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model  # type: ignore[operator,union-attr,assignment]  # peft's
    return inner


def loss_shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss predicts the next token, so that the first label of each row is not a target.

    Mirrors:
        The test that `transformers.Trainer` makes on `model.loss_type`.
    """
    kind = getattr(model, "loss_type", None)
    if kind is None or sys.modules.get("transformers") is None:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    shifts: bool = LOSS_MAPPING.get(kind) is ForCausalLMLoss
    return shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def is_causal_lm(model: nn.Module) -> bool:
    """Whether `transformers` lists the model's class for causal language modelling."""
    if sys.modules.get("transformers") is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(unwrap_peft(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def check_trainable(model: object) -> None:
    """Refuse a model that cannot be trained, for example one that is sharded otherwise than by FSDP 2."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"`model` is a {type(model).__name__}, not a torch.nn.Module.\n\n"
            "Hint: pass a module, or a function that makes one as `model_init`."
        )
    # a compiled model, and a model with adapters, has the attributes of the inner model
    if sys.modules.get("transformers") is not None and getattr(model, "is_quantized", False):
        check_quantization(model, is_peft_model(model))
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from hf_compat.runtime.meshes import tensor_ranks

    meshes = {
        name: p.data.device_mesh.mesh_dim_names or ()
        for name, p in model.named_parameters()
        if isinstance(p.data, DTensor)
    }
    split = next((name for name, axes in meshes.items() if _NOT_SUPPORTED.intersection(axes)), None)
    if split is not None:
        raise UnsupportedArgument(
            f"The model's parameter {brief(split)} is spread over the axes {meshes[split]}: experts (`ep_size`), "
            "stages (`pp_size`) and sequences are not shared between processes here.\n\n"
            "Hint: load the model with `DistributedConfig(tp_size=…, fsdp_size=…)`, or whole. `fsdp=True` or "
            "`deepspeed` shards a whole model."
        )
    if tensor_ranks(model) > 1 and is_peft_model(model):
        raise UnsupportedArgument(
            "The model's layers are split between processes, and it has adapters, which are not supported there.\n\n"
            "Hint: load the model whole, add the adapters, and set `fsdp=True` or `deepspeed`."
        )
    is_sharded = is_sharded_when_loaded(model) and any(isinstance(part, FSDPModule) for part in model.modules())
    whole = next((name for name, p in model.named_parameters() if p.requires_grad and name not in meshes), None)
    if meshes and whole is not None and is_sharded:
        raise UnsupportedArgument(
            f"The model was sharded when it was loaded, and its parameter {brief(whole)} is whole: adapters that were "
            "added later are not supported.\n\nHint: load the model whole, add the adapters, and set `fsdp=True`."
        )


def is_sharded_when_loaded(model: nn.Module | None) -> bool:
    """Return whether `from_pretrained(distributed_config=…)` has sharded a model, as transformers asks it."""
    return getattr(model, "is_distributed_loading_by_transformers", False) is True


# Axes of a mesh over which transformers spreads experts, stages or sequences
_NOT_SUPPORTED = frozenset({"ep", "pp", "cp", "sp"})


def pads_itself(processing_class: object) -> bool:
    """Whether a processing class pads samples, as tokenizers and feature extractors do."""
    if sys.modules.get("transformers") is not None:
        return _is_padding(processing_class)
    return callable(getattr(processing_class, "pad", None))


def align_special_tokens(model: nn.Module, processing_class: object) -> None:
    """Copy a tokenizer's special tokens into the configurations of a model, as the installed release does.

    Releases before 4.56 leave the configurations as they are.

    Mirrors:
        `transformers.trainer_utils.align_special_tokens`, or `transformers.Trainer._align_special_tokens`, 4.56.
    """
    if not (_has_tokens(processing_class) and hasattr(model, "config")):
        return
    theirs = of_installed("trainer_utils", "align_special_tokens")
    if theirs is not None:
        theirs(model, processing_class)
    elif (method := getattr(of_installed("trainer", "Trainer"), "_align_special_tokens", None)) is not None:
        method(SimpleNamespace(model=model, processing_class=processing_class))


def reporting_callback(tracker: str) -> type | None:
    """Transformers' own callback of a tracker, or None without transformers or such a callback."""
    callbacks = of_installed("integrations.integration_utils", "INTEGRATION_TO_CALLBACK")
    return callbacks.get(tracker) if isinstance(callbacks, dict) else None


def read_pretrained(folder: str, architecture: str) -> nn.Module | None:
    """Make a model of transformers with the weights of a folder, or None if it has no such class."""
    if not is_installed("transformers"):
        return None
    import transformers

    kind = getattr(transformers, architecture, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return None
    model: nn.Module = kind.from_pretrained(folder)  # type: ignore[attr-defined]  # mypy does not see it there
    return model


Place = int | str | torch.device  # a number counts accelerators
_OFFLOADED = ("cpu", "disk")


def is_model_parallel(model: nn.Module, device: torch.device) -> bool:
    """Whether a model is on several accelerators, or on another device than the run's.

    Mirrors:
        `transformers.Trainer.is_model_parallel`.
    """
    places = {place for place in _placement(model).values() if place not in _OFFLOADED}
    return len(places) > 1 or not all(_is_same(place, device) for place in places)


def check_placement(model: nn.Module, device: torch.device, world_size: int) -> None:
    """Refuse a placement with which no run can train.

    Mirrors:
        `accelerate.Accelerator.prepare_model`, 1.13.
    """
    if world_size > 1 and is_spread(model):
        raise UnsupportedArgument(
            f"The model is spread over devices (`device_map`), and there are {world_size} processes: each of them "
            "needs the whole model on its own device.\n\n"
            "Hint: run one process. Or load it without `device_map='auto'`, and let `fsdp` or `deepspeed` shard it."
        )
    places = set(_placement(model).values())
    if not places or not any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (8, 4)):
        return
    offloaded = [str(place) for place in places if place == "disk" or (str(place) == "cpu" and device.type != "cpu")]
    if offloaded:
        raise UnsupportedArgument(
            f"The model is loaded in 8 or 4 bits and parts of it are offloaded ({', '.join(sorted(offloaded))}): such "
            "parts cannot be trained.\n\nHint: load it with `device_map={'': torch.cuda.current_device()}`."
        )
    if len(places) == 1 and not any(_is_same(place, device) for place in places):
        raise UnsupportedArgument(
            f"The model is loaded in 8 or 4 bits on {next(iter(places))}, and this process trains on {device}: "
            "quantized weights cannot be moved.\n\nHint: load it with `device_map={'': torch.cuda.current_device()}`."
        )


def is_spread(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is on several devices according to its `hf_device_map`."""
    return any(len(_placement(part)) > 1 for part in model.modules())


def _is_same(place: Place, device: torch.device) -> bool:
    named = torch.device("cuda" if device.type == "cpu" else device.type, place) if isinstance(place, int) else place
    found = torch.device(named)
    return found.type == device.type and (found.index or 0) == (device.index or 0)


def _placement(model: nn.Module) -> Mapping[str, Place]:
    found = getattr(model, "hf_device_map", None)
    return found if isinstance(found, Mapping) else {}


Config = Mapping[str, bool]


def check_liger(model: nn.Module | None, config: object) -> None:
    """Refuse options that Liger cannot apply, before training."""
    _package()
    chosen = _as_config(config)
    functions = getattr(sys.modules.get("liger_kernel.transformers.monkey_patch"), "MODEL_TYPE_TO_APPLY_LIGER_FN", None)
    kind = None if model is None else getattr(getattr(unwrap_peft(model), "config", None), "model_type", None)
    if not isinstance(functions, Mapping) or kind is None:
        return
    if kind not in functions:
        warn_once(f"`use_liger_kernel=True` has no effect: Liger has no kernels for models of the type {brief(kind)}.")
        return
    known = [name for name in inspect.signature(functions[kind]).parameters if name != "model"]
    unknown = next((name for name in chosen if name not in known), None)
    if unknown is not None:
        hint = did_you_mean(unknown, known, f"the kernels are {', '.join(known)}.")
        told = shown("liger_kernel_config", dict(chosen))
        raise ArgumentError(f"`{told}`: Liger has no kernel {brief(unknown)} for this model.\n\nHint: {hint}")


def apply_liger(model: nn.Module, config: object) -> None:
    """Put Liger's kernels into a model, in place.

    Mirrors:
        `transformers.integrations.liger.apply_liger_kernel`.
    """
    inner = unwrap_peft(model)
    if is_transformers_model(inner):
        _package()._apply_liger_kernel_to_instance(model=inner, **_as_config(config))
    else:
        warn_once(
            f"`use_liger_kernel=True` has no effect: {type(inner).__name__} is not a `PreTrainedModel` of transformers."
        )


def _package() -> ModuleType:
    if "liger_kernel" not in sys.modules and not is_installed("liger_kernel"):
        raise missing_package("liger_kernel", "liger-kernel", "`use_liger_kernel=True`")
    try:
        return importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise MissingPackage(
            f"`use_liger_kernel=True` needs liger-kernel, which does not load here: {error}.\n\n"
            "Hint: pip install liger-kernel triton. Its kernels need a GPU."
        ) from error


def _as_config(config: object) -> Config:
    """Read the configuration."""
    chosen: dict[str, bool] = dict(config) if isinstance(config, Mapping) else {}
    name = next((name for name, value in chosen.items() if not isinstance(value, bool)), None)
    if name is not None:
        raise ArgumentError(
            f"`{shown('liger_kernel_config', chosen)}`: {name} is not a truth value.\n\nHint: write true or false."
        )
    if chosen.get("cross_entropy") and chosen.get("fused_linear_cross_entropy"):
        raise ArgumentError(
            f"`{shown('liger_kernel_config', chosen)}` chooses two kernels of the loss.\n\n"
            "Hint: choose `cross_entropy` or `fused_linear_cross_entropy`."
        )
    return chosen


# Module → name → its value when `patch()` replaced names there.
GLOBALS_BEFORE: dict[str, dict[str, object]] = {}


def is_same_global(before: object, here: object) -> bool:
    """Whether a global has kept its value. Scripts change lists and dicts in place."""
    return before == here if type(here) in (list, dict) else before is here


def global_of_trainer(name: str) -> object:
    """Read the value that a script has assigned to a name of `transformers.trainer`, or None if it has not."""
    before = GLOBALS_BEFORE.get("transformers.trainer")
    here = None if before is None else vars(sys.modules["transformers.trainer"]).get(name)
    return None if before is None or here is None or is_same_global(before.get(name), here) else here


# Modules of transformers with the callbacks that a Trainer adds by default.
_HOMES = (
    "transformers.trainer_callback",
    "transformers.integrations.integration_utils",
    "transformers.trainer_jit_checkpoint",
)


def known_to_transformers(kind: type[TrainerCallback]) -> type[TrainerCallback]:
    """Make our class a subclass of transformers' class of the same name, too, if that is imported.

    The methods of all events are ours.
    """
    for home in _HOMES:
        theirs = getattr(sys.modules.get(home), kind.__name__, None)
        if isinstance(theirs, type) and not issubclass(kind, theirs):
            return _both(kind, theirs)  # type: ignore[arg-type]  # classes have a hash
    return kind


def notebooks_callback() -> type | None:
    """Transformers' `NotebookProgressCallback`, if this is a notebook's process and transformers is installed."""
    found = of_installed("utils.notebook", "NotebookProgressCallback") if in_notebook() else None
    return found if isinstance(found, type) else None


@functools.cache
def _both(ours: type[TrainerCallback], theirs: type) -> type[TrainerCallback]:
    content = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__doc__": ours.__doc__}
    # If `patch()` came before the import of theirs, our base is its base, and its events would come before ours
    events = {name: getattr(ours, name) for name in EVENTS}

    def reduce(callback: TrainerCallback, protocol: int) -> tuple[object, ...]:
        return rebuilt_with_base, (known_to_transformers, ours, vars(callback))

    return type(ours.__name__, (ours, theirs), {**content, **events, "__reduce_ex__": reduce})
