"""Questions about `transformers` and `peft` objects, answered without importing either."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Protocol

import torch
from torch import nn

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.interop.releases import align_tokens, check_quantization
from hf_compat.runtime.text import is_installed


def loaded(package: str) -> ModuleType | None:
    """Return a package that somebody imported already, else None."""
    return sys.modules.get(package)


def _is_instance(candidate: object, package: str, *names: str) -> bool:
    module = loaded(package)
    if module is None:
        return False
    classes = tuple(cls for cls in (getattr(module, name, None) for name in names) if isinstance(cls, type))
    return isinstance(candidate, classes)


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is wrapped by `peft`."""
    return _is_instance(model, "peft", "PeftModel", "PeftMixedModel")


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is one of `transformers`."""
    return _is_instance(model, "transformers", "PreTrainedModel")


def is_pretrained_model(model: nn.Module) -> bool:
    """Return whether a model saves itself as `transformers` or `peft` models do."""
    return _is_instance(model, "transformers", "PreTrainedModel") or is_peft_model(model)


def takes_loss_keywords(model: nn.Module) -> bool | None:
    """Return whether a model's forward counts the items of an update, where its release says so by a parameter's name.

    Up to 4.46 that is `**loss_kwargs`: models with other keywords of any name (`EncoderDecoderModel`) pass them on to
    modules that do not know `num_items_in_batch`.

    Returns:
        None where the release has no such rule, or where the model is none of transformers.
    """
    utils = loaded("transformers.utils") if is_transformers_model(model) else None
    if utils is None or hasattr(utils, "TransformersKwargs") or hasattr(utils, "LossKwargs"):
        return None
    return "loss_kwargs" in inspect.signature(model.forward).parameters


def as_held(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a model's files under the names, and in the forms, in which the model holds them.

    Since 5.0 some models of transformers hold other parameters than their files do: GPT-NeoX another name of its head,
    mixtures of experts one tensor for all experts of a layer. `from_pretrained` knows how to read such files.

    Args:
        model: The model; any other than such a one gets the weights as they are.
        weights: Whole tensors by their names in the files.

    Differs:
        `transformers.Trainer`, 5.23, leaves these parameters as they are when it resumes or loads the best model.
    """
    own = {name.replace("_orig_mod.", "") for name in model.state_dict()}
    kind = _kind_with_other_names(model) if own - weights.keys() and weights.keys() - own else None
    if kind is None:
        return weights
    with torch.random.fork_rng(devices=[]):  # it fills what is missing with random numbers
        held, told = kind.from_pretrained(None, config=model.config, state_dict=dict(weights), output_loading_info=True)
    missing, unknown = set(told["missing_keys"]), set(told["unexpected_keys"])
    read = {name: tensor for name, tensor in held.state_dict().items() if name not in missing}
    return {**read, **{name: tensor for name, tensor in weights.items() if name in unknown}}


class _ReadsFiles(Protocol):
    """A model class of transformers."""

    def from_pretrained(self, path: None, **how: object) -> tuple[nn.Module, Mapping[str, Iterable[str]]]: ...


def _kind_with_other_names(model: nn.Module) -> _ReadsFiles | None:
    """Return the class of transformers that reads the model's files, where these have names of their own."""
    mappings = loaded("transformers.conversion_mapping")
    if mappings is None or not is_transformers_model(model):
        return None
    if not mappings.get_model_conversion_mapping(model, add_legacy=False):
        return None
    kinds = (kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models."))
    return next(kinds, None)  # type: ignore[return-value]  # each of them has `from_pretrained`


def is_upstream_rebalance_sampler(sampler: object) -> bool:
    """Return whether a sampler is `transformers.trainer_pt_utils.BatchRebalanceSampler`."""
    return _is_instance(sampler, "transformers.trainer_pt_utils", "BatchRebalanceSampler")


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the model inside a `peft` wrapper, or the model itself."""
    if not is_peft_model(model):
        return model
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model  # type: ignore[operator,union-attr,assignment]  # peft's
    return inner


def loss_shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss predicts the next token, so the first label of each row is not a target.

    Mirrors:
        The test that `transformers.Trainer` makes on `model.loss_type`, 5.23.
    """
    kind = getattr(model, "loss_type", None)
    if kind is None or loaded("transformers") is None:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    shifts: bool = LOSS_MAPPING.get(kind) is ForCausalLMLoss
    return shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether the model's class is one that `transformers` lists for causal language modelling."""
    if loaded("transformers") is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(unwrap_peft(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def check_trainable(model: object) -> None:
    """Refuse models that `transformers` knows cannot be trained as they are.

    Raises:
        ArgumentError: It is not a module.
        UnsupportedArgument: Its parameters are spread over processes already.
        ValueError: A quantized model without adapters.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"`model` is a {type(model).__name__}, not a torch.nn.Module.\n\n"
            "Hint: pass a module, or a function that makes one as `model_init`."
        )
    # transformers' own FSDP loading and tensor parallelism leave such parameters
    split = next((name for name, p in model.named_parameters() if type(p.data).__name__ == "DTensor"), None)
    if split is not None and type(model).__name__[:4] != "FSDP":
        raise UnsupportedArgument(
            f"The model's parameter {split!r} is spread over processes already (`tp_plan`, or a distributed "
            "configuration at load time), which is not supported yet.\n\n"
            "Hint: load the model whole; `fsdp=True` or `deepspeed` shards it for training."
        )
    # A compiled model, and one with adapters, has the attributes of the one within
    if loaded("transformers") is not None and getattr(model, "is_quantized", False):
        check_quantization(model, is_peft_model(model))


def pads_itself(processing_class: object) -> bool:
    """Return whether a processing class pads samples: a tokenizer or feature extractor."""
    if loaded("transformers") is not None:
        return _is_instance(processing_class, "transformers", "PreTrainedTokenizerBase", "SequenceFeatureExtractor")
    return callable(getattr(processing_class, "pad", None))


def align_special_tokens(model: nn.Module, processing_class: object) -> None:
    """Copy the special tokens of a tokenizer into the model's configuration, as `transformers` does before training."""
    is_text = _is_instance(processing_class, "transformers", "PreTrainedTokenizerBase", "ProcessorMixin")
    if is_text and hasattr(model, "config"):
        align_tokens(model, processing_class)


def is_datasets_dataset(dataset: object) -> bool:
    """Return whether a data set is a table of the `datasets` library."""
    return _is_instance(dataset, "datasets", "Dataset")


def is_datasets_stream(dataset: object) -> bool:
    """Return whether a data set is a stream of the `datasets` library, which knows its shards."""
    return _is_instance(dataset, "datasets", "IterableDataset")


def reporting_callback(tracker: str) -> type | None:
    """Return transformers' own callback of a tracker; None where transformers is not installed or knows none."""
    if not is_installed("transformers"):
        return None
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return INTEGRATION_TO_CALLBACK.get(tracker)


def read_pretrained(folder: str, architecture: str) -> nn.Module | None:
    """Make a model of transformers with the weights of a folder; None where transformers itself has no such class."""
    if not is_installed("transformers"):
        return None
    import transformers

    kind = getattr(transformers, architecture, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return None
    model: nn.Module = kind.from_pretrained(folder)  # type: ignore[attr-defined]  # mypy does not see it there
    return model
