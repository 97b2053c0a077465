"""Mistakes that people make: one clear error before the first step, of a type that HF's `except` matches."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from helpers import toy
from hf_compat import EarlyStoppingCallback, HFDataModule, HFModule, Trainer, TrainerCallback, TrainingArguments
from hf_compat.errors import ArgumentError, CallbackError, CheckpointError, DataError, LossError, UnsupportedArgument


def raises(kind, *words):
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(word) for word in words))


def test_a_misspelt_argument_names_the_nearest():
    with raises(TypeError, "learning_rte", "did you mean `learning_rate`"):
        TrainingArguments("out", learning_rte=1e-3)


def test_a_misspelt_trainer_argument_names_the_nearest(make_args):
    with raises(TypeError, "train_datset", "did you mean `train_dataset`"):
        Trainer(toy.Classifier(), make_args(), train_datset=toy.rows())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"eval_strategy": "step"}, ("'step'", "choose one of", "'steps'")),
        ({"gradient_accumulation_steps": 0}, ("gradient_accumulation_steps=0",)),
        ({"per_device_train_batch_size": 2.5}, ("per_device_train_batch_size=2.5",)),
        ({"logging_steps": 0}, ("logging_steps",)),
        ({"save_strategy": "steps", "save_steps": 2.5}, ("save_steps=2.5", "integer")),
        ({"warmup_steps": -1}, ("warmup_steps=-1",)),
        ({"load_best_model_at_end": True, "save_strategy": "steps"}, ("load_best_model_at_end", "match")),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "save_strategy": "steps",
                "eval_steps": 3,
                "save_steps": 4,
            },
            ("save_steps=4", "eval_steps=3"),
        ),
        ({"fp16": True, "bf16": True}, ("fp16", "bf16")),
        ({"bf16": True, "use_cpu": False}, ("bf16", "use_cpu=True")),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ("reduce_lr_on_plateau", "eval strategy")),
        ({"dataloader_prefetch_factor": 2}, ("dataloader_prefetch_factor=2", "dataloader_num_workers")),
        ({"train_sampling_strategy": "shuffled"}, ("'shuffled'", "'sequential'")),
        ({"accelerator_config": {"even_batch": True}}, ("even_batch", "even_batches")),
        ({"torch_empty_cache_steps": 0}, ("torch_empty_cache_steps=0",)),
        ({"evaluation_strategy": "epoch", "eval_strategy": "steps"}, ("evaluation_strategy", "eval_strategy='steps'")),
    ],
)
def test_arguments_that_cannot_work(make_args, values, words):
    if torch.cuda.is_available() and values.get("use_cpu") is False:
        pytest.skip("bf16 works on a GPU")
    with raises(ValueError, *words) as caught:
        make_args(**values)
    assert isinstance(caught.value, ArgumentError)


def test_all_complaints_come_at_once(make_args):
    with raises(ArgumentError, "warmup_steps=-1", "fp16"):
        make_args(warmup_steps=-1, fp16=True, bf16=True)


def test_what_has_no_effect_is_warned_about(make_args):
    with pytest.warns(UserWarning, match="Without effect.*ddp_timeout=60"):
        Trainer(toy.Classifier(), make_args(ddp_timeout=60, max_steps=1), train_dataset=toy.rows()).train()
    with pytest.warns(UserWarning, match="save_safetensors=False.*no effect"):
        make_args(save_safetensors=False)


def test_evaluation_without_a_data_set(make_args):
    with raises(ValueError, "eval_strategy", "eval_dataset"):
        Trainer(toy.Classifier(), make_args(eval_strategy="epoch"), train_dataset=toy.rows())
    with raises(ValueError, "eval_dataset"):
        Trainer(toy.Classifier(), make_args()).evaluate()
    with raises(ValueError, "train_dataset"):
        Trainer(toy.Classifier(), make_args()).train()


def test_endless_data_without_max_steps(make_args):
    with raises(ValueError, "max_steps has to be specified"):
        Trainer(toy.Classifier(), make_args(), train_dataset=toy.Stream(toy.rows()))


def test_no_data(make_args):
    with raises(DataError, "gives no batch"):
        Trainer(toy.Classifier(), make_args(dataloader_drop_last=True), train_dataset=toy.rows(3)).train()


def test_a_stream_whose_epochs_are_shorter_than_an_update(make_args):
    args = make_args(max_steps=5, gradient_accumulation_steps=10)
    with raises(DataError, "gradient_accumulation_steps=10", "no update would ever be made"):
        Trainer(toy.Classifier(), args, train_dataset=toy.Stream(toy.rows(12))).train()


def test_a_stream_without_a_sample(make_args):
    with raises(ValueError, "`train_dataset` (Stream) gave no samples", "next(iter(train_dataset))"):
        Trainer(toy.Classifier(), make_args(max_steps=5), train_dataset=toy.Stream([])).train()


def test_a_data_set_without_any_column_the_model_takes(make_args):
    import datasets

    table = datasets.Dataset.from_list([{"text": "a", "score": 1.0}] * 8)
    with raises(ValueError, "No columns in the", "score, text", "remove_unused_columns"):
        Trainer(toy.Classifier(), make_args(), train_dataset=table).train()
    with raises(ValueError, "No columns in the", "score, text"):
        Trainer(toy.Classifier(), make_args(), train_dataset=table.to_list()).train()


def test_a_model_that_returns_no_loss(make_args):
    unlabelled = [{"x": row["x"]} for row in toy.rows()]
    with raises(ValueError, "did not return a loss", "logits", "labels") as caught:
        Trainer(toy.Classifier(), make_args(), train_dataset=unlabelled).train()
    assert isinstance(caught.value, LossError)


def test_model_and_model_init_together(make_args):
    with raises(ValueError, "model_init", "not both"):
        Trainer(toy.Classifier(), make_args(), model_init=lambda: toy.Classifier())
    with raises(RuntimeError, "model_init"):
        Trainer(args=make_args())


@pytest.mark.parametrize("name", ["model_init", "compute_loss_func", "preprocess_logits_for_metrics"])
def test_what_is_no_function(make_args, name):
    model = None if name == "model_init" else toy.Classifier()
    with raises(ArgumentError, f"`{name}=3` cannot be called"):
        Trainer(model, make_args(), train_dataset=toy.rows(), **{name: 3})


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ((lambda given: {}, []), "`compute_loss_func="),
        ((lambda given: {},), "`compute_loss_func="),
        ((None, [], (None, None)), "`compute_metrics=[]`"),
        ((None, (object(),)), "`compute_metrics=("),
    ],
)
def test_positional_arguments_at_their_places_before_4_46(make_args, last, told):
    given = (toy.Classifier(), make_args(), None, toy.rows(), toy.rows(), None, None, *last)
    with raises(ArgumentError, told, "Since transformers 4.46", "name these arguments"):
        Trainer(*given)


@pytest.mark.parametrize("function", [lambda *given: given[0].loss, lambda outputs, **rest: outputs.loss])
def test_a_loss_function_that_takes_labels_somehow_is_no_moved_argument(make_args, function):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), compute_loss_func=function)
    assert trainer.compute_loss_func is function


@pytest.mark.parametrize("name", ["compute_loss", "training_step", "log"])
def test_a_subclass_with_a_loss_of_its_own_calls_its_function_as_it_likes(make_args, name):
    def one(outputs):
        return outputs["loss"]

    own = type("Own", (Trainer,), {name: lambda self, *given, **named: getattr(Trainer, name)(self, *given, **named)})
    options = {"train_dataset": toy.rows(), "compute_loss_func": one}
    if name == "log":  # it says nothing of the loss
        with raises(ArgumentError, "takes no labels", "the outputs, the labels and `num_items_in_batch`"):
            own(toy.Classifier(), make_args(), **options)
    else:
        assert own(toy.Classifier(), make_args(), **options).compute_loss_func is one


def test_what_is_no_function_natively(make_args):
    with raises(ArgumentError, "`compute_loss_func=3` cannot be called"):
        HFModule(toy.Classifier(), make_args(), compute_loss_func=3)
    with raises(ArgumentError, "`data_collator=", "cannot be called"):
        HFDataModule(make_args(), toy.rows(), None, None, toy.rows())


def test_an_optimizer_without_its_pair(make_args):
    model = toy.Classifier()
    with raises(ArgumentError, "a pair of an optimizer and a schedule", "`optimizers=(optimizer, None)`"):
        Trainer(model, make_args(), train_dataset=toy.rows(), optimizers=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_bare_encoder_cannot_be_trained(make_args):
    from transformers import BertConfig, BertModel

    bare = BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=32)
    )
    trainer = Trainer(bare, make_args(), train_dataset=toy.labelled_blocks())
    with raises(ValueError, "did not return a loss", "last_hidden_state"):
        trainer.train()


def test_a_metric_that_evaluations_do_not_give(make_args):
    args = make_args(eval_strategy="epoch", metric_for_best_model="f1")
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9))
    with raises(KeyError, "eval_f1", "eval_loss"):
        trainer.train()


def test_early_stopping_without_what_it_needs(make_args):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), callbacks=[EarlyStoppingCallback()])
    with raises(AssertionError, "metric_for_best_model"):
        trainer.train()


def test_callbacks_that_are_none(make_args):
    with raises(TypeError, "not a callback"):
        Trainer(toy.Classifier(), make_args(), callbacks=[object()])
    with raises(ValueError, "must be a list"):
        Trainer(toy.Classifier(), make_args(), callbacks=EarlyStoppingCallback())


@pytest.mark.parametrize("answer", [{"should_stop": True}, 3])
def test_callbacks_that_return_nonsense(make_args, answer):
    class Odd(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            return answer

    with raises(CallbackError, "Odd.on_step_end"):
        Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), callbacks=[Odd]).train()


def test_resuming_from_nothing(make_args, tmp_path):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows())
    with raises(ValueError, "No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    with raises(CheckpointError, "Can't find a valid checkpoint at"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_an_output_folder_with_files_is_never_wiped(make_args, tmp_path):
    folder = tmp_path / "out"
    (folder / "checkpoint-4").mkdir(parents=True)
    (folder / "checkpoint-4" / "mine.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    args = make_args(save_strategy="steps", save_steps=4, overwrite_output_dir=True, max_steps=5)
    Trainer(toy.Classifier(), args, train_dataset=toy.rows()).train()
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "checkpoint-4" / "mine.txt").read_text() == "mine"
    assert (folder / "checkpoint-4" / "model.safetensors").is_file()


class UserError(Exception):
    pass


def _failing(where):
    def fail(*args, **kwargs):
        raise UserError(where)

    return fail


@pytest.mark.parametrize("where", ["dataset", "collator", "metric", "callback", "model", "loss"])
def test_errors_of_the_users_code_come_out_as_they_are(make_args, tmp_path, where, capsys):
    class Fails(toy.Table):
        def __getitem__(self, index):
            return super().__getitem__(index) if self.reads < 60 else _failing(where)()

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 10 and where == "callback":
                raise UserError(where)

    class Model(toy.Classifier):
        calls = 0

        def forward(self, x, labels=None):
            self.calls += 1
            return _failing(where)() if self.calls == 15 and where == "model" else super().forward(x, labels)

    def collate(rows):
        from hf_compat import default_data_collator

        collate.calls += 1
        return default_data_collator(rows) if collate.calls < 16 else _failing(where)()

    collate.calls = 0

    def loss(outputs, labels, num_items_in_batch=None):
        loss.calls += 1
        value = nn.functional.cross_entropy(outputs["logits"], labels)
        return value if loss.calls < 15 else _failing(where)()

    loss.calls = 0
    args = make_args(save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=9, disable_tqdm=False)
    trainer = Trainer(
        Model(),
        args,
        train_dataset=Fails(toy.rows()) if where == "dataset" else toy.rows(),
        eval_dataset=toy.rows(5),
        data_collator=collate if where == "collator" else None,
        compute_metrics=_failing(where) if where == "metric" else None,
        compute_loss_func=loss if where == "loss" else None,
        callbacks=[Callback],
    )
    bars = [callback for callback in trainer.callback_handler.callbacks if hasattr(callback, "training_bar")]
    with pytest.raises(UserError, match=where):
        trainer.train()
    assert bars and bars[0].training_bar is None and bars[0].prediction_bar is None
    assert (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").is_file()
    assert not list((tmp_path / "out").glob(".saving-*"))


def test_ctrl_c_comes_out_as_itself(make_args):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), callbacks=[Interrupt])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.pop_callback(Interrupt)
    assert trainer.train().global_step == 26


def test_a_native_module_refuses_what_a_trainer_refuses(make_args):
    with raises(ImportError, "use_liger_kernel=True", "Hint", "pip install liger-kernel"):
        HFModule(toy.Classifier(), make_args(use_liger_kernel=True))


def test_a_model_that_is_spread_over_processes_already(make_args):
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = toy.Classifier()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh, of_experts = (init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("fsdp", "ep"))
        model.outer.bias = nn.Parameter(distribute_tensor(model.outer.bias.data, of_experts))
        with raises(UnsupportedArgument, "'outer.bias' is spread over the axes ('ep',)", "Hint"):
            Trainer(model, make_args(), train_dataset=toy.rows(4))
        with_adapters = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2))
        with_adapters.is_distributed_loading_by_transformers = True
        with raises(UnsupportedArgument, "'1.weight' is whole", "Hint: load the model whole, add the adapters"):
            Trainer(with_adapters, make_args(), train_dataset=toy.rows(4))
    finally:
        distributed.destroy_process_group()
