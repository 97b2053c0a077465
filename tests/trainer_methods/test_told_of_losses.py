"""A loss that nothing divides is told with the factor, once, and its ways out give the right one."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import numpy as np
import pytest
import torch

from helpers.line import Line, points
from hf_compat import Trainer
from hf_compat.engine.loss_count import Count


class Dropping(Line):
    """Takes keywords, and drops them."""

    def forward(self, x, labels=None, **kwargs):
        return super().forward(x, labels)


class Wrapping(Line):
    """Hands keywords to a part that drops them."""

    def __init__(self):
        super().__init__()
        self.inner = Dropping()

    def forward(self, x, labels=None, **kwargs):
        return self.inner(x, labels, **kwargs)


class Dividing(Line):
    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(x, labels)
        if num_items_in_batch is not None:
            out["loss"] = out["loss"] * len(x) / num_items_in_batch
        return out


class DividingByNumber(Dividing):
    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        items = num_items_in_batch if num_items_in_batch is None else num_items_in_batch.item()
        return super().forward(x, labels, items)


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(x=inputs["x"], labels=inputs["labels"])
        return (out["loss"], out) if return_outputs else out["loss"]


def squared(outputs, labels, num_items_in_batch=None):
    return ((outputs["logits"] - labels) ** 2).mean()


def accumulated(make_args, model, kind=Trainer, steps=4, after=lambda trainer: None, **parts):
    values = {"max_steps": 1, "gradient_accumulation_steps": steps, "per_device_train_batch_size": 1}
    args = make_args(**values, logging_steps=1, max_grad_norm=1e6, num_train_epochs=3.0)
    trainer = kind(model, args, train_dataset=points(4), **parts)
    after(trainer)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def in_class(trainer):
    type(trainer.model).accepts_loss_kwargs = False
    trainer._introspect()


def in_trainer(trainer):
    trainer.loss_is_scaled_for_ga = False


@pytest.mark.parametrize(
    ("model", "kind", "parts", "who", "way_out"),
    [
        (Dropping, Trainer, {}, "`forward` of Dropping", in_class),
        (Wrapping, Trainer, {}, "`forward` of Wrapping", in_class),
        (Dividing, OwnLoss, {}, "`compute_loss` of OwnLoss", in_trainer),
        (Line, Trainer, {"compute_loss_func": squared}, "`compute_loss_func` ignores", in_trainer),
    ],
)
def test_a_loss_that_ignores_its_count_is_told_with_the_factor(make_args, told, model, kind, parts, who, way_out):
    class Fresh(model):
        pass

    Fresh.__name__ = model.__name__
    assert accumulated(make_args, Fresh(), kind, **parts) == pytest.approx(14.0), "as transformers"
    assert f"{who}" in told() and "are 4 times too large" in told()
    assert accumulated(make_args, Fresh(), kind, after=way_out, **parts) == pytest.approx(3.5), "by the way out"
    assert told().count("too large") == 1


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss.backward()
        return loss.detach()


class DividingStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = loss / self.current_gradient_accumulation_steps
        loss.backward()
        return loss.detach()


class StepOfOurs(Trainer):
    def training_step(self, *given):
        return super().training_step(*given)


class Counting(Trainer):
    """Counts the items by itself, as a plain number."""

    def get_batch_samples(self, epoch_iterator, num_batches, device=None):
        return super().get_batch_samples(epoch_iterator, num_batches, device)[0], 4


@pytest.mark.parametrize("model", [Line, Dropping])
def test_an_own_step_that_divides_by_nothing_is_told(make_args, told, model):
    class Fresh(model):
        pass

    assert accumulated(make_args, Fresh(), OwnStep) == pytest.approx(14.0), "as transformers"
    assert "`training_step` of OwnStep ignores" in told() and "4 times too large" in told()
    assert accumulated(make_args, Fresh(), DividingStep) == pytest.approx(3.5), "by the way out"
    assert told().count("too large") == 1
    accumulated(make_args, Dividing(), OwnStep)
    accumulated(make_args, Line(), StepOfOurs)
    assert told().count("too large") == 1


@pytest.mark.parametrize(
    ("kind", "values"), [(Trainer, {"torch_compile": True, "torch_compile_backend": "eager"}), (Counting, {})]
)
def test_a_loss_that_cannot_be_watched_is_read(make_args, told, kind, values):
    make = functools.partial(make_args, **values)
    for model in (Dividing, Wrapping):  # the last one hands the keywords on, to code that is not read
        accumulated(make, model(), kind)
    assert "too large" not in told()
    assert accumulated(make, Dropping(), kind) == pytest.approx(14.0)
    assert "`forward` of Dropping ignores" in told()


@pytest.mark.parametrize("model", [Line, Dividing, DividingByNumber])
def test_a_loss_that_is_divided_is_not_told(make_args, told, model):
    assert accumulated(make_args, model()) == pytest.approx(3.5)
    accumulated(make_args, Dropping(), steps=1)
    assert "too large" not in told()


USES_OF_A_COUNT = (
    *(float, int, torch.Tensor.item, torch.Tensor.numpy, np.asarray, copy.deepcopy, math.log),
    lambda n: 8 / n,
    lambda n: torch.ones(2) / n.to("cpu"),
    lambda n: torch.ones(()).div(n.clone()),
    lambda n: n.long().item(),
    lambda n: torch.stack([n]),
    lambda n: pickle.loads(pickle.dumps(n)),
)


def timed(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class DividingByBatches(Trainer):
    """As TRL's GRPOTrainer, whose helper only a decorated method calls."""

    @timed
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs)["loss"] / self.current_gradient_accumulation_steps
        self._log_metric(loss)
        return loss

    def _log_metric(self, loss):
        self.noted = loss.item()


def test_a_decorated_loss_that_divides_by_the_micro_batches_is_not_told(make_args, told):
    accumulated(make_args, Dropping(), DividingByBatches)
    assert not told()


def test_a_count_under_watch_behaves_as_a_tensor():
    items = torch.tensor(4.0)
    count = Count.of(items)
    assert count.dtype == items.dtype and count.shape == items.shape and f"{count:.1f}" == "4.0" and count.is_cpu
    assert count and count > 3 and not count.uses
    for use in USES_OF_A_COUNT:
        count = Count.of(items)
        found, right = use(count), use(items)
        assert count.uses, use
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(right)), use
        assert not isinstance(right / 1, Count)
    count /= 2
    assert items == 2.0, "code may change it in place"


@pytest.mark.parametrize("kind", [Trainer, OwnLoss])
def test_finding_out_calls_nothing_twice(make_args, told, kind):
    calls = []

    class Counting(kind):
        def compute_loss(self, *given, **more):
            calls.append("loss")
            return super().compute_loss(*given, **more)

    model = Dropping()
    model.register_forward_hook(lambda *given: calls.append("forward"))
    accumulated(make_args, model, Counting)
    assert calls == ["forward", "loss"] * 4 or calls == ["loss", "forward"] * 4
    assert told().count("too large") == 1


def test_preflight_tells_of_an_ignored_count(make_args):
    args = make_args(gradient_accumulation_steps=2, per_device_train_batch_size=2)
    report = Trainer(Dropping(), args, train_dataset=points(8)).preflight()
    assert any("2 times too large" in one.problem for one in report.warnings), report
