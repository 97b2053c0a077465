"""Say what is wrong with a loss, and choose the hint by what is known of it.

`LossFacts` holds what came back, who returned it, and of which inputs. `RULES` has a row for each cause. The first one
that applies gives the hint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Never

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_compat.data.types import ModelOutput
from hf_compat.errors import LossError, warn_once
from hf_compat.runtime.inspection import accepted_parameters, accepts_keyword
from hf_compat.runtime.text import brief

IGNORED_LABEL = -100  # of the losses of torch and transformers


class Maker(StrEnum):
    """What has returned a loss: the method's name, or the argument's."""

    FORWARD = "forward"
    COMPUTE_LOSS = "compute_loss"
    LOSS_FUNCTION = "compute_loss_func"
    STEP = "training_step"  # of an HFModule


_RETURN = {
    Maker.FORWARD: "`return loss, logits`",
    Maker.COMPUTE_LOSS: "`return (loss, outputs) if return_outputs else loss`",
    Maker.LOSS_FUNCTION: "`return loss`",
    Maker.STEP: "`return loss`",
}


class Part(NamedTuple):
    """A tensor among those that a model has returned."""

    place: str  # as code finds it: `[1]`, `['logits']`, `.logits`
    is_loss_like: bool  # a floating-point scalar, with a gradient if gradients are computed
    has_gradient: bool


class Answer(NamedTuple):
    """What a model has returned, without its tensors, which would stay in memory."""

    kind: str  # its type
    names: tuple[str, ...]  # of a mapping
    place: str  # of what was taken for the loss. Empty if that is all of it, or if there is none
    others: tuple[Part, ...]


# By a loss that has no backward pass: the answer of the model in which it was found.
_ANSWERS = WeakTensorKeyDictionary()


def answer_of(outputs: ModelOutput, loss: object) -> Answer:
    """Describe a model's answer, in which a loss was found."""
    named: Mapping[str, object] = {}
    if isinstance(outputs, Mapping):
        named = {f"[{brief(key)}]": value for key, value in outputs.items()}
    elif isinstance(outputs, (list, tuple)):
        named = {f"[{index}]": value for index, value in enumerate(outputs)}
    elif not isinstance(outputs, torch.Tensor):
        named = {f".{name}": value for name, value in getattr(outputs, "__dict__", {}).items()}
    place, others = "", []
    for where, value in named.items():
        if value is loss:
            place = where
        elif isinstance(value, torch.Tensor):
            is_loss_like = value.ndim == 0 and value.is_floating_point()
            is_loss_like &= value.requires_grad or not torch.is_grad_enabled()
            others.append(Part(where, is_loss_like, value.requires_grad))
    names = tuple(map(str, outputs)) if isinstance(outputs, Mapping) else ()
    return Answer(type(outputs).__name__, names, place, tuple(others))


def note_answer(outputs: ModelOutput, loss: object) -> None:
    """Remember a model's answer as long as its loss lives, if that has no backward pass."""
    if isinstance(loss, torch.Tensor) and (loss.ndim or (not loss.requires_grad and torch.is_grad_enabled())):
        _ANSWERS[loss] = answer_of(outputs, loss)


def is_trainable(loss: object) -> bool:
    """Whether a loss is one number with a backward pass."""
    return isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad and not loss.is_meta


@dataclass(kw_only=True)
class LossFacts:
    """What is known of a loss.

    Attributes:
        loss: What was returned as the loss. None if there is none.
        maker: Who has returned it.
        owner: The object whose method that is. A function has none.
        model: The model that takes the inputs.
        label_names: The names of the labels that a run expects.
        inputs: The micro-batch. None if it is unknown.
        answer: What the model has returned, if the loss was found in it.
        with_outputs: Whether the loss was asked for together with the outputs, as evaluations do.
    """

    loss: object
    maker: Maker
    owner: object
    model: nn.Module
    label_names: Sequence[str]
    inputs: object
    answer: Answer | None = None
    with_outputs: bool = False

    def __post_init__(self) -> None:
        found: Answer | None = None
        if isinstance(self.loss, torch.Tensor) and self.loss in _ANSWERS:
            found = _ANSWERS[self.loss]
        if found is not None:  # whoever has returned it, it is the model's own
            self.maker, self.owner, self.answer = Maker.FORWARD, self.model, found

    @property
    def who(self) -> str:
        """The name of the method or function."""
        return f"`{self.maker}`" + ("" if self.owner is None else f" of {type(self.owner).__name__}")

    @property
    def tensor(self) -> torch.Tensor | None:
        """The loss, if it is a tensor."""
        return self.loss if isinstance(self.loss, torch.Tensor) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The loss's shape. Empty for a scalar, and for other objects."""
        return () if self.tensor is None else tuple(self.tensor.shape)

    @property
    def is_of_model(self) -> bool:
        return self.maker is Maker.FORWARD

    @property
    def is_number(self) -> bool:
        return isinstance(self.loss, (int, float)) or type(self.loss).__module__ == "numpy"

    @property
    def is_called_loss(self) -> bool:
        """Whether the model has returned it under the name `loss`."""
        return self.answer is not None and self.answer.place in ("['loss']", ".loss")

    @property
    def may_be_logits(self) -> bool:
        """Whether the model has returned no loss, or an array of numbers that may be anything."""
        return self.is_of_model and not self.is_called_loss and (self.loss is None or self.shape != ())

    @property
    def others(self) -> tuple[Part, ...]:
        """The tensors that were returned beside the loss."""
        return () if self.answer is None else self.answer.others

    @property
    def better(self) -> str | None:
        """The place of a scalar with a gradient, if what was taken for the loss is not called so."""
        found = () if self.is_called_loss else self.others
        return next((part.place for part in found if part.is_loss_like), None)

    @property
    def is_one_number(self) -> bool:
        """Whether it has a backward pass, and nothing looks more like the loss. It may have dimensions."""
        loss = self.tensor
        has_backward = loss is not None and loss.numel() == 1 and loss.requires_grad and not loss.is_meta
        return has_backward and self.better is None

    @property
    def names_of_inputs(self) -> list[str]:
        """The names in the micro-batch."""
        return list(self.inputs) if isinstance(self.inputs, Mapping) else []

    @property
    def taken_labels(self) -> list[str]:
        """The names of labels that the model's `forward` takes."""
        return [name for name in self.label_names or ("labels",) if accepts_keyword(self.model.forward, name)]

    @property
    def given_labels(self) -> dict[str, object]:
        """The labels among the inputs, by name."""
        inputs = self.inputs if isinstance(self.inputs, Mapping) else {}
        return {name: inputs[name] for name in self.label_names or ("labels",) if inputs.get(name) is not None}

    @property
    def labels(self) -> torch.Tensor | None:
        """The labels among the inputs, if they are one tensor."""
        found = list(self.given_labels.values())
        return found[0] if len(found) == 1 and isinstance(found[0], torch.Tensor) else None

    @property
    def is_unreduced(self) -> bool:
        """Whether it has a number for each label, or where the labels are gone, for each sample."""
        if self.labels is not None:
            return self.shape in (tuple(self.labels.shape), (self.labels.numel(),))
        inputs = self.inputs if isinstance(self.inputs, Mapping) else {}
        sizes = {len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim}
        return len(self.shape) == 1 and self.shape[0] in sizes

    @property
    def mean(self) -> str:
        """The code of its mean."""
        counts = self.labels is not None and self.is_unreduced and bool((self.labels == IGNORED_LABEL).any())
        return "`loss.sum() / labels.ne(-100).sum()`" if counts else "`loss.mean()`"

    @property
    def way_to_return(self) -> str:
        """How a method or function ends."""
        method = getattr(self.owner, "compute_loss", None) if self.maker is Maker.COMPUTE_LOSS else None
        lacks_switch = method is not None and not accepts_keyword(method, "return_outputs")
        before = "add the parameter `return_outputs=False` and " if lacks_switch else ""
        return f"{before}end it with {_RETURN[self.maker]}"

    @property
    def way_to_compute(self) -> str:
        """How predictions become a loss."""
        names = " and ".join(f"`{name}`" for name in self.given_labels) or "the labels"
        end = f" and return it first, {_RETURN[self.maker]}" if self.is_of_model else ""
        return f"compute the loss from the predictions and {names}{end}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _has_outputs(facts: LossFacts) -> bool:
    """Whether a model's outputs were returned in place of their loss."""
    held = facts.loss.get("loss") if isinstance(facts.loss, Mapping) else getattr(facts.loss, "loss", None)
    return facts.tensor is None and isinstance(held, torch.Tensor)


def _is_frozen(facts: LossFacts) -> bool:
    return not any(parameter.requires_grad for parameter in facts.model.parameters())


def _shape_of_labels(facts: LossFacts) -> str:
    return "" if facts.labels is None else f" The labels have the shape {tuple(facts.labels.shape)}."


class Rule(NamedTuple):
    """A cause, and what helps."""

    applies: Callable[[LossFacts], object]
    hint: Callable[[LossFacts], str]


# From the surest evidence to the weakest.
RULES: Sequence[Rule] = (
    Rule(lambda facts: facts.tensor is not None and facts.tensor.is_meta, lambda facts: "load the model's weights"),
    Rule(
        lambda facts: facts.with_outputs and isinstance(facts.loss, (torch.Tensor, list, tuple)),
        lambda facts: f"evaluations ask for the outputs with `return_outputs=True`, so {facts.way_to_return}",
    ),
    Rule(
        lambda facts: facts.better is not None,
        lambda facts: (
            f"`{facts.better}` of what it returned is a scalar with a gradient. If that is the loss, "
            + (f"return it first, {_RETURN[Maker.FORWARD]}" if "'" not in str(facts.better) else "name it `loss`")
        ),
    ),
    Rule(
        lambda facts: facts.may_be_logits and facts.answer is not None and facts.answer.kind == "NoneType",
        lambda facts: facts.way_to_return,
    ),
    Rule(
        lambda facts: facts.may_be_logits and not facts.taken_labels,
        lambda facts: (
            f"`forward` takes {_names(accepted_parameters(facts.model.forward).places)} and no labels. Add the "
            f"parameter `labels`, and {facts.way_to_compute}. Or set `label_names=['labels']`, and pass a "
            "`compute_loss_func` of outputs and labels. A loss that needs no labels has to be one number: "
            "`loss.mean()`"
        ),
    ),
    Rule(
        lambda facts: facts.may_be_logits and facts.names_of_inputs and not facts.given_labels,
        lambda facts: (
            f"the inputs are {_names(facts.names_of_inputs)}, and `forward` computes its loss from "
            f"{_names(facts.taken_labels)}. Give the data's column, or the collator's entry, that name"
        ),
    ),
    Rule(
        lambda facts: facts.is_of_model and facts.loss is None,
        lambda facts: f"the labels are among the inputs, so {facts.way_to_compute}, or under `loss`",
    ),
    Rule(lambda facts: facts.loss is None, lambda facts: facts.way_to_return),
    Rule(
        lambda facts: facts.is_number,
        lambda facts: "a number has no gradient. Return the tensor, without `.item()` or `float(…)`",
    ),
    Rule(
        _has_outputs,
        lambda facts: (
            "these are the model's outputs. Take their loss, "
            f"`loss = outputs{'[' + repr('loss') + ']' if isinstance(facts.loss, Mapping) else '.loss'}`, and "
            f"{facts.way_to_return}"
        ),
    ),
    Rule(
        lambda facts: facts.tensor is None and facts.maker is Maker.COMPUTE_LOSS,
        lambda facts: f"the outputs belong to it where `return_outputs=True` asks for them, so {facts.way_to_return}",
    ),
    Rule(lambda facts: facts.tensor is None, lambda facts: f"return the loss alone: {facts.way_to_return}"),
    Rule(
        lambda facts: facts.shape and (facts.is_called_loss or (facts.is_unreduced and not facts.may_be_logits)),
        lambda facts: f"take its mean, {facts.mean}",
    ),
    Rule(
        lambda facts: facts.shape and facts.is_unreduced and facts.others,
        lambda facts: f"it has a number for each label. Take its mean, {facts.mean}",
    ),
    Rule(
        lambda facts: facts.shape and facts.is_unreduced,
        lambda facts: (
            f"it has a number for each label. If these are losses, take their mean, {facts.mean}. If they are "
            f"predictions, {facts.way_to_compute}"
        ),
    ),
    Rule(lambda facts: facts.shape == (1,), lambda facts: "make it a scalar, `loss.squeeze()`"),
    Rule(
        lambda facts: facts.shape,
        lambda facts: (
            f"it may be the predictions.{_shape_of_labels(facts)} Then {facts.way_to_compute}. If these are losses, "
            f"take their mean, {facts.mean}"
        ),
    ),
    Rule(
        _is_frozen,
        lambda facts: "call `requires_grad_(True)` on the parameters to train, before making the Trainer",
    ),
    Rule(
        lambda facts: facts.tensor is not None and not facts.tensor.is_floating_point(),
        lambda facts: "whole numbers have no gradient. Compute it without `argmax` and comparisons",
    ),
    Rule(
        lambda facts: any(part.has_gradient for part in facts.others),
        lambda facts: (
            "the other outputs have a gradient, so it was lost on the way to the loss. Compute the loss without "
            "`detach`, `item`, `torch.tensor(…)` or `no_grad`"
        ),
    ),
    Rule(
        lambda facts: True,
        lambda facts: "compute it from parameters with `requires_grad=True`, without `detach`, `item` or `no_grad`",
    ),
)


def hint_of(facts: LossFacts) -> str:
    """Choose the hint for a loss that cannot be trained with."""
    return next(rule.hint(facts) for rule in RULES if rule.applies(facts))


def refuse(facts: LossFacts) -> Never:
    """Raise the error for a loss that cannot be trained with.

    Raises:
        LossError: It names who has returned the loss, what is wrong with it, and the way out.
    """
    raise LossError(f"{_what_is_wrong(facts)}.\n\nHint: {hint_of(facts)}.")


def _what_is_wrong(facts: LossFacts) -> str:
    loss, answer = facts.tensor, facts.answer
    if facts.with_outputs and not facts.is_number:
        return f"{facts.who} returned {_kind(facts.loss)} instead of the loss and the outputs"
    if loss is None and answer is not None and answer.names:
        return (
            "The model did not return a loss from the inputs, only the following keys: "
            f"{','.join(answer.names)}. For reference, the inputs it received are {','.join(facts.names_of_inputs)}"
        )
    if loss is None:
        value = f" ({brief(facts.loss, 40)})" if facts.is_number else ""
        found = answer.kind if answer is not None and answer.kind != "NoneType" else None
        returned = _kind(facts.loss) if found is None else f"a {found}"
        return f"{facts.who} returned {returned}{value} instead of a loss, so there is nothing to train on"
    what = "does not require grad"
    if facts.shape:
        what = f"has the shape {facts.shape}, and is not a scalar"
    elif loss.is_meta:
        what = "is on the meta device, which holds no numbers"
    elif _is_frozen(facts):
        what += ", and no parameter of the model does, as all are frozen"
    place = f" as `{answer.place}` of its {answer.kind}" if answer is not None and answer.place else ""
    return f"The loss {what}, so there is no gradient to train with. {facts.who} returned it{place}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def warn_of_mean(facts: LossFacts) -> None:
    """Warn of an evaluation's loss that is the mean of something else, as transformers computes it."""
    is_loss = facts.is_called_loss or facts.is_unreduced or facts.shape == (1,)
    if facts.better is not None or not is_loss:
        warn_once(
            f"The loss of this evaluation is the mean of a tensor of the shape {facts.shape}, as in transformers. "
            f"{facts.who} returned it.\n\nHint: {hint_of(facts)}."
        )
