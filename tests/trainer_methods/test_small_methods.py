"""Small methods of the Trainer, each called beside upstream's: what they return, set or raise."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import hf_compat
from helpers.toy import Classifier, Stream, blocks, rows, tiny_gpt2
from hf_compat.interop.transformers_models import pads_itself

APIS = ("transformers", "hf_compat")
IDS, PADDED = torch.arange(8).reshape(2, 4), torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])
NO_MODEL, TWO_ARGUMENTS = (lambda: None), (lambda trial, more: Classifier())


def made(api, tmp_path, values=(), model=None, **options):
    args = importlib.import_module(api).TrainingArguments(
        str(tmp_path / api), use_cpu=True, report_to="none", disable_tqdm=True, **dict(values)
    )
    model = model() if callable(model) and not isinstance(model, nn.Module) else model
    if "model_init" not in options:
        options["model"] = Classifier() if model is None else model
    return importlib.import_module(api).Trainer(args=args, **{"train_dataset": rows(8), **options})


def outcome(call):
    """Return what a call gives, or the builtin kind of its error."""
    try:
        return call()
    except Exception as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def under_both(tmp_path, call, **options):
    found = [outcome(lambda api=api: call(made(api, tmp_path, **options))) for api in APIS]
    assert found[0] == found[1]
    return found[1]


@pytest.mark.parametrize(
    ("how", "inputs", "pad", "counted"),
    [
        ("no", {"input_ids": IDS}, 0, 0),
        ("all", {"input_ids": IDS}, 0, 8),
        ("all", {"input_ids": PADDED, "attention_mask": PADDED > 0}, 0, 8),
        ("non_padding", {"input_ids": PADDED, "attention_mask": (IDS > 2).long()}, 0, 5),
        ("non_padding", {"input_ids": PADDED}, 0, 3),
        ("non_padding", {"input_ids": PADDED}, 3, 7),
        ("non_padding", {"input_ids": PADDED}, None, 8),
        ("all", {"x": IDS}, 0, 0),
    ],
)
def test_tokens_that_were_seen(tmp_path, how, inputs, pad, counted):
    def count(trainer):
        trainer.processing_class = SimpleNamespace(pad_token_id=pad)
        for _ in range(2):
            trainer._track_num_input_tokens(inputs)
        return trainer.state.num_input_tokens_seen

    values = {"include_num_input_tokens_seen": how}
    assert under_both(tmp_path, count, values=values, model=tiny_gpt2) == 2 * counted


def test_a_batch_without_names_has_no_tokens_to_count(tmp_path):
    trainer = made("hf_compat", tmp_path, {"include_num_input_tokens_seen": "all"})
    trainer._track_num_input_tokens([IDS])
    assert trainer.state.num_input_tokens_seen == 0 == trainer.floating_point_ops(3)


@pytest.mark.parametrize("model", [Classifier, tiny_gpt2])
@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, {"x": IDS}, [IDS]])
def test_operations_of_a_batch(tmp_path, model, inputs):
    found = under_both(tmp_path, lambda trainer: int(trainer.floating_point_ops(inputs)), model=model)
    assert (found > 0) == (model is tiny_gpt2 and inputs == {"input_ids": IDS})


@pytest.mark.parametrize("model", [Classifier, tiny_gpt2])
@pytest.mark.parametrize("loss", [None, lambda outputs, labels, num_items_in_batch: outputs["logits"].sum()])
@pytest.mark.parametrize(
    "batches",
    [
        [{"labels": IDS - 100}, {"labels": torch.full((1, 4), -100)}],
        [{"labels": PADDED, "shift_labels": torch.tensor([-100, 1, 2])}],
        [{"labels": [1, 2]}],
        [{"labels": [{"class_labels": IDS}]}],
        [{"x": IDS}],
        [],
    ],
)
def test_items_of_a_window(tmp_path, model, loss, batches):
    def count(trainer):
        found = trainer._get_num_items_in_batch(batches, trainer.args.device)
        return (float(found), str(found.dtype)) if isinstance(found, torch.Tensor) else found

    options = {"model": model, "compute_loss_func": loss}
    theirs, ours = (outcome(lambda api=api: count(made(api, tmp_path, **options))) for api in APIS)
    assert (ours and ours[0]) == (theirs and theirs[0])
    is_counted = bool(batches) and hasattr(batches[0].get("shift_labels", batches[0].get("labels")), "ne")
    assert (ours is not None) == (is_counted and (model is tiny_gpt2 or loss is not None))


def groups(trainer):
    model = trainer.model
    before = [outcome(trainer.get_learning_rates), outcome(trainer.get_optimizer_group)]
    trainer.create_optimizer()
    found = [trainer.get_optimizer_group(one)["weight_decay"] for one in (model.inner.weight, model.norm.bias)]
    sizes = [[part.numel() for part in group] for group in trainer.get_optimizer_group()]
    return before, trainer.get_learning_rates(), found, sizes, trainer.get_num_trainable_parameters()


def test_groups_rates_and_trainable_parameters(tmp_path):
    model = Classifier()
    model.outer.weight.requires_grad = False
    values = {"weight_decay": 0.5, "learning_rate": 0.25}
    before, rates, decays, sizes, count = groups(made("hf_compat", tmp_path, values, model))
    assert before == ["ValueError"] * 2 and rates == [0.25] * 2 and decays == [0.5, 0.0]
    assert sum(map(sum, sizes)) == count
    trainer = made("hf_compat", tmp_path, values, model)
    trainer.create_optimizer()
    everything = trainer.get_optimizer_group(nn.Parameter(torch.zeros(1)))  # upstream fails: it compares values
    assert [len(group) for group in everything] == [len(group) for group in trainer.get_optimizer_group()]
    theirs = made("transformers", tmp_path, values, model)
    rest = [
        outcome(theirs.get_learning_rates),
        outcome(theirs.get_optimizer_group),
        theirs.get_num_trainable_parameters(),
    ]
    theirs.create_optimizer()
    assert rest == [*before, count] and theirs.get_learning_rates() == rates
    assert [[part.numel() for part in group] for group in theirs.get_optimizer_group()] == sizes


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model_init": NO_MODEL}, "RuntimeError"),
        ({"model_init": TWO_ARGUMENTS}, "RuntimeError"),
        ({"model_init": lambda trial: Classifier()}, None),
        ({"model_init": Classifier, "optimizers": (None, SimpleNamespace())}, "RuntimeError"),
        ({"model_init": Classifier, "optimizers": (SimpleNamespace(), None)}, "RuntimeError"),
        ({"optimizers": (torch.optim.SGD(Classifier().parameters(), 1), None),
          "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1})}, "RuntimeError"),
        ({"values": {"eval_strategy": "steps", "eval_steps": 1}}, "ValueError"),
        ({"values": {"eval_strategy": "epoch"}, "eval_dataset": rows(4)}, None),
        ({"values": {"save_strategy": "best", "eval_strategy": "epoch"}, "eval_dataset": rows(4)}, "ValueError"),
        ({"values": {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "loss"},
          "eval_dataset": rows(4)}, None),
        ({"values": {"batch_eval_metrics": True}, "compute_metrics": lambda found: {}}, "ValueError"),
        ({"values": {"batch_eval_metrics": True}, "compute_metrics": lambda found, compute_result: {}}, None),
    ],
)  # fmt: skip
def test_what_a_trainer_cannot_be_made_of(tmp_path, options, error):
    assert under_both(tmp_path, lambda trainer: None, **options) == error


def test_a_trainer_that_saves_the_best_evaluates(tmp_path):
    with pytest.raises(hf_compat.errors.ArgumentError, match="saves after evaluations, but `eval_strategy='no'`"):
        made("hf_compat", tmp_path, {"save_strategy": "best", "metric_for_best_model": "loss"})


def lengths(loader):
    return [len(batch["labels"]) for batch in loader]


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: lengths(trainer.get_eval_dataloader("second")),
        lambda trainer: lengths(trainer.get_eval_dataloader(rows(5))),
        lambda trainer: lengths(trainer.get_test_dataloader(rows(3))),
        lambda trainer: (trainer.num_examples(trainer.get_train_dataloader()), len(trainer.get_train_dataloader())),
        lambda trainer: trainer._get_train_sampler(Stream(rows(4))) is None,
        lambda trainer: trainer._get_eval_sampler(Stream(rows(4))) is None,
        lambda trainer: type(trainer._get_train_sampler()).__name__,
        lambda trainer: type(trainer._get_eval_sampler(rows(4))).__name__,
        lambda trainer: list(trainer._get_eval_sampler(rows(4))),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "values", [{"per_device_eval_batch_size": 2}, {"dataloader_drop_last": True, "per_device_eval_batch_size": 2}]
)
def test_loaders_and_samplers(tmp_path, call, values):
    under_both(tmp_path, call, values=values, eval_dataset={"first": rows(3), "second": rows(7)})


def test_one_of_several_sets_has_to_be_named(tmp_path):
    trainer = made("hf_compat", tmp_path, eval_dataset={"first": rows(3), "second": rows(7)})
    for name in (None, "third"):
        with pytest.raises(hf_compat.errors.DataError, match=r"first(.|\n)*second"):
            trainer.get_eval_dataloader(name)


@pytest.mark.parametrize("name", ["get_train_dataloader", "train", "get_eval_dataloader"])
def test_without_data_the_error_is_upstreams(tmp_path, name):
    assert under_both(tmp_path, lambda trainer: getattr(trainer, name)(), train_dataset=None) == "ValueError"


@pytest.mark.parametrize("is_first", [True, False])
def test_metrics_and_state_are_written_by_the_first_process(tmp_path, capsys, is_first):
    written = {}
    for api in APIS:
        trainer = made(api, tmp_path)
        trainer.is_world_process_zero = lambda: is_first
        for split, metrics in (("train", {"train_loss": 0.5, "train_runtime": 2.25}), ("eval", {"eval_loss": 1})):
            trainer.log_metrics(split, metrics)
            trainer.save_metrics(split, metrics)
        trainer.save_metrics("test", {"test_loss": 2}, combined=False)
        folder = tmp_path / api
        written[api] = {path.name: path.read_text() for path in folder.glob("*")}, capsys.readouterr().out
    assert written["hf_compat"] == written["transformers"]
    assert len(written["hf_compat"][0]) == 4 * is_first and bool(written["hf_compat"][1]) == is_first


@pytest.mark.parametrize("skipped", [0, 1, 2, 3])
@pytest.mark.parametrize("data", [rows(5), Stream(rows(5))])
def test_the_accelerator_skips_batches_of_a_loader(tmp_path, data, skipped):
    def rest(trainer):
        loader = DataLoader(data, batch_size=2, collate_fn=trainer.data_collator)
        return [batch["labels"].tolist() for batch in trainer.accelerator.skip_first_batches(loader, skipped)]

    labels = [int(row["labels"]) for row in rows(5)]
    assert under_both(tmp_path, rest) == [labels[at : at + 2] for at in range(2 * skipped, 5, 2)]


def test_batches_that_are_skipped_twice_add_up(tmp_path):
    accelerator = made("hf_compat", tmp_path).accelerator
    loader = accelerator.skip_first_batches(DataLoader(rows(8), batch_size=2), 1)
    assert len(list(accelerator.skip_first_batches(loader, 2))) == 1 and len(list(loader)) == 3


def test_a_model_that_a_device_map_has_placed_is_not_moved(tmp_path):
    def moved(trainer):
        places = []
        model = SimpleNamespace(hf_device_map={"": 0}, to=places.append)
        trainer._move_model_to_device(model, trainer.args.device)
        trainer._move_model_to_device(SimpleNamespace(to=places.append), trainer.args.device)
        return places

    assert under_both(tmp_path, moved) == [torch.device("cpu")]


def test_a_short_last_window_is_counted(tmp_path):
    def windows(trainer):
        batches = iter(trainer.get_train_dataloader())
        found = [trainer.get_batch_samples(batches, 2, trainer.args.device) for _ in range(3)]
        return [(len(samples), None if items is None else int(items)) for samples, items in found]

    values = {"per_device_train_batch_size": 2}
    assert [
        count for count, _ in under_both(tmp_path, windows, values=values, model=tiny_gpt2, train_dataset=blocks(5))
    ] == [2, 1, 0]


def test_gradients_of_prepared_and_trained_optimizers_are_unscaled_each_in_its_way(tmp_path):
    accelerator = made("hf_compat", tmp_path).accelerator
    layers = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    prepared = [accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in layers]
    for layer in layers:
        layer.weight.grad = torch.full((1, 2), 8.0)
    accelerator.unscale_gradients()  # there is no scale
    assert layers[0].weight.grad.tolist() == [[8.0, 8.0]]
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accelerator.scaler.scale(torch.ones(()))  # makes the scale
    accelerator.unscale_gradients(prepared[0])
    assert [layer.weight.grad[0, 0].item() for layer in layers] == [2.0, 8.0]
    accelerator.unscale_gradients([prepared[1]])
    assert [layer.weight.grad[0, 0].item() for layer in layers] == [2.0, 2.0]

    trained, told = torch.optim.SGD(layers[0].parameters(), lr=0.1), []
    held = SimpleNamespace(model=layers[0])
    accelerator.take_up(held, trained)
    accelerator.unscale_gradients(trained)  # no update is under way
    accelerator.unscale = told.append
    accelerator.unscale_gradients(trained)
    assert told == [trained] and layers[0].weight.grad[0, 0].item() == 2.0


def test_the_trained_objects_come_before_the_prepared_ones(tmp_path):
    accelerator = made("hf_compat", tmp_path).accelerator
    own, model = nn.Linear(2, 1), nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, own))
    accelerator.prepare(own, model, other, optimizer)
    seen = accelerator.take_up(SimpleNamespace(model=model), optimizer)
    assert accelerator._models == [model, own]
    assert [one.optimizer for one in accelerator._optimizers] == [optimizer, other]
    assert accelerator._optimizers[0] is seen and type(seen).__name__ == "PreparedOptimizer"
    engine = SimpleNamespace()  # an engine's optimizer is no optimizer of torch, and is seen as it is
    assert accelerator.take_up(SimpleNamespace(model=model), engine) is engine
    assert accelerator._models == [model, own] and accelerator._optimizers[0] is engine


@pytest.mark.parametrize("values", [(), {"bf16": True}.items()])
def test_a_further_model_gets_the_runs_precision(tmp_path, values):
    accelerator = made("hf_compat", tmp_path, values).accelerator
    model = nn.Sequential(nn.Linear(2, 1))
    assert accelerator.prepare_model(model, evaluation_mode=True) is model and model in accelerator._models
    inside = []
    model[0].register_forward_hook(lambda module, inputs, output: inside.append(output.dtype))
    assert model(torch.ones(1, 2)).dtype == torch.float32  # given back in full precision
    assert inside[-1] == (torch.bfloat16 if values else torch.float32)


def test_the_old_method_pads_the_second_dimension(tmp_path, monkeypatch):
    trainer, asked = made("hf_compat", tmp_path), []
    monkeypatch.setattr(
        trainer.accelerator, "pad_across_processes", lambda tensor, **values: asked.append((tensor, values)) or "padded"
    )
    assert trainer._pad_across_processes("it") == trainer._pad_across_processes("it", pad_index=0) == "padded"
    assert asked == [("it", {"dim": 1, "pad_index": -100}), ("it", {"dim": 1, "pad_index": 0})]


class _Pads:
    def pad(self): ...


@pytest.mark.parametrize("has_transformers", [True, False])
def test_what_pads_samples_is_known_with_and_without_transformers(monkeypatch, has_transformers):
    monkeypatch.setitem(sys.modules, "transformers", transformers if has_transformers else None)
    assert not pads_itself(object()) and pads_itself(_Pads()) is not has_transformers


def test_a_lightning_callbacks_state_goes_through_its_text(tmp_path):
    class Counts(pl.Callback):
        number = 3

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state):
            self.number = state["number"]

    first, second = (hf_compat.LightningCallbackAdapter(Counts()) for _ in range(2))
    first.callback.number = 7
    assert first.saved == first.state()["attributes"]["saved"]
    second.saved = first.saved
    assert second._saved == {"number": 7}  # loaded when the training begins


def test_a_callback_that_is_not_there_cannot_be_removed(tmp_path):
    trainer = made("hf_compat", tmp_path)
    trainer.remove_callback(hf_compat.EarlyStoppingCallback)  # of a class there may be none, as upstream
    with pytest.raises(ValueError, match=r"EarlyStoppingCallback.* is not among the callbacks"):
        trainer.remove_callback(hf_compat.EarlyStoppingCallback())
    trainer.add_callback(hf_compat.EarlyStoppingCallback)
    assert trainer.pop_callback(hf_compat.EarlyStoppingCallback) is not None
    assert trainer.pop_callback(hf_compat.EarlyStoppingCallback) is None


@pytest.mark.parametrize(
    ("values", "own", "factor"),
    [
        ({}, False, 2 * 4),
        ({"average_tokens_across_devices": False}, False, 2),
        ({}, True, 2),  # whose items are not those of all ranks
    ],
)
def test_how_much_too_large_a_loss_is_that_nothing_divides(tmp_path, monkeypatch, values, own, factor):
    trainer = made("hf_compat", tmp_path, {"gradient_accumulation_steps": 2, **values})
    monkeypatch.setattr(trainer.accelerator, "rank_slice", SimpleNamespace(world_size=4))
    if own:
        monkeypatch.setattr(trainer, "compute_loss", lambda *_: None)
    trainer.current_gradient_accumulation_steps = 2
    assert trainer._count_factor() == factor


@pytest.mark.parametrize(
    ("batch", "items", "is_averaged", "weight"),
    [
        ({}, torch.tensor(6.0), True, 3.0),
        ({}, torch.tensor(6.0), False, 6.0),
        ({"labels": torch.tensor([[-100, 1, 2], [3, -100, 4]])}, None, False, 4),
        ({"labels": torch.tensor([[-100, 1, 2], [3, -100, 4]])}, 9, True, 4),
        ({"labels": torch.tensor([[0.5, 1.0]])}, None, False, 1),
        ({"x": torch.zeros(3, 2)}, None, False, 3),
        ((torch.zeros(3, 2),), None, False, 3),
        ({}, None, False, 0),
    ],
)
def test_a_batch_weighs_as_many_tokens_as_it_has_targets(batch, items, is_averaged, weight, tmp_path, monkeypatch):
    trainer = made("hf_compat", tmp_path, {"average_tokens_across_devices": is_averaged}, nn.Linear(2, 2))
    monkeypatch.setattr(type(trainer), "_get_num_items_in_batch", lambda self, batches, device: items)
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(rank_slice=SimpleNamespace(world_size=2)))
    assert trainer._weight_in_evaluation(batch) == weight


@pytest.mark.parametrize("kind", [hf_compat.TrainerCallback, pl.Callback])
def test_a_callback_is_removed_once(kind, tmp_path):
    class Own(kind):
        def on_train_end(self, *args, **kwargs):
            """Be a callback."""

    trainer, one = made("hf_compat", tmp_path), Own()
    trainer.add_callback(one)
    trainer.remove_callback(one)
    with pytest.raises(ValueError, match="is not among the callbacks"):
        trainer.remove_callback(one)
    trainer.add_callback(one)
    trainer.remove_callback(Own)
    trainer.remove_callback(Own)  # as upstream, of a class there may be none
    assert trainer.pop_callback(Own) is None and trainer.pop_callback(one) is None
