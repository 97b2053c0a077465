"""The Trainer's features that public libraries use. Each row overrides, reads or imports one under both engines.

A method is overridden in both Trainers, and must be called at the same updates, in the same mode, with the same
arguments. An expression is read where the library reads it, and must give the same value as under transformers.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import hf_compat
from helpers import toy
from hf_compat import Trainer
from hf_compat.errors import OverrideError
from hf_compat.interop.patching import refuse_edited_methods

# Methods that a library's trainers override, or call through `super()`.
OVERRIDDEN = {
    "TRL": """compute_loss training_step prediction_step log _save_checkpoint _set_signature_columns_if_needed
        _remove_unused_columns _get_collator_with_removed_columns get_train_dataloader get_eval_dataloader
        _get_dataloader _get_train_sampler _get_eval_sampler _prepare_inputs evaluate evaluation_loop
        compute_loss_context_manager autocast_smart_context_manager _inner_training_loop _maybe_log_save_evaluate
        _evaluate _determine_best_metric _get_learning_rate store_flos _load_optimizer_and_scheduler get_tp_size
        is_world_process_zero add_callback create_model_card""",
    "sentence-transformers": """get_test_dataloader create_optimizer create_scheduler get_optimizer_cls_and_kwargs
        get_decay_parameter_names _load_from_checkpoint _load_best_model _save call_model_init save_model
        is_local_process_zero""",
    "SetFit": "pop_callback remove_callback",
    "axolotl": """_save_optimizer_and_scheduler _save_rng_state _save_scaler _load_rng_state _get_output_dir
        create_accelerator_and_postprocess _wrap_model _load_callback_state""",
    "others": """get_batch_samples _prepare_input num_examples floating_point_ops save_metrics log_metrics save_state
        set_initial_training_values _get_num_items_in_batch _move_model_to_device get_learning_rates
        get_num_trainable_parameters _init_training_state get_total_train_batch_size predict train""",
}
# The number of these calls may differ.
ANSWERS = {
    "get_tp_size",
    "is_world_process_zero",
    "num_examples",
    "_move_model_to_device",
    "get_num_trainable_parameters",
}
# What libraries read, by the method in which they read it.
READ = {
    "TRL": {
        "compute_loss": """self.model is self.model_wrapped | model is self.model_wrapped | self.model.training
            | self.state.global_step | self.state.epoch | self.state.max_steps | self.args.n_gpu | self.args.device
            | self.current_gradient_accumulation_steps | self.accelerator.num_processes | self.accelerator.device
            | self.accelerator.unwrap_model(model) is self.model | self.accelerator.is_main_process
            | self.accelerator.process_index | self.accelerator.local_process_index | self.accelerator.sync_gradients
            | self.accelerator.gather_for_metrics(torch.ones(2)) | self.accelerator.gather(torch.ones(2))
            | self.accelerator.reduce(torch.ones(2), "mean") | self.accelerator.mixed_precision
            | self.accelerator.distributed_type | self.accelerator.state.deepspeed_plugin
            | getattr(self.accelerator.state, "fsdp_plugin", None) | self.is_deepspeed_enabled | self.is_fsdp_enabled
            | self.model_accepts_loss_kwargs | self.loss_is_scaled_for_ga | self.compute_loss_func
            | self.label_smoother | self.label_names | self.can_return_loss | self._train_batch_size
            | self.accelerator.pad_across_processes(torch.ones(2, 2), dim=1) | self.accelerator.parallelism_config
            | self.accelerator.torch_device_mesh | self.state.num_input_tokens_seen | self.is_in_train
            | self.args.average_tokens_across_devices | self.accelerator.gradient_accumulation_steps
            | self.optimizer is not None | len(self.optimizer.param_groups) if self.optimizer else None
            | type(self.callback_handler).__name__ | self.accelerator.wait_for_everyone()""",
        "training_step": """self.optimizer.param_groups[0]["lr"] | self.lr_scheduler.get_last_lr()
            | len(self.optimizer.state_dict()["param_groups"]) | hasattr(self.optimizer, "zero_grad")
            | self.callback_handler.model is self.model | self.callback_handler.optimizer is self.optimizer
            | self.callback_handler.lr_scheduler is self.lr_scheduler | self.args.train_batch_size
            | len(self.callback_handler.train_dataloader) | self.state.train_batch_size | self.state.num_train_epochs
            | self.args.gradient_checkpointing_kwargs | self.args.parallel_mode.value
            | self.args.distributed_state.num_processes | self.args.process_index | self.control.should_log""",
        "prediction_step": """self.model.training | model is self.model | self.state.global_step | self.is_in_train
            | self.accelerator.device | self.args.eval_batch_size | self.args.prediction_loss_only""",
        "log": """self.model.training | self.state.global_step | self.state.epoch | self.control.should_log
            | self.control.should_evaluate | self.control.should_save | self.control.should_training_stop
            | len(self.state.log_history)""",
        "_maybe_log_save_evaluate": """self._globalstep_last_logged
            | self._total_loss_scalar if self.state.max_steps == 8 else None
            | self.control.should_log | self.control.should_evaluate | self.control.should_save
            | self._get_learning_rate() | self.current_flos | self.is_in_train""",
        "_save_checkpoint": """self.hub_model_id | self.args.hub_model_id | self.args.should_save
            | self.args.push_to_hub
            | self.state.is_world_process_zero | self.state.is_local_process_zero | self.args.report_to
            | self.processing_class is not None | self.tokenizer_or_none()
            | self.accelerator.unwrap_model(self.model) is self.model""",
        "get_train_dataloader": """self._train_batch_size | self.args.dataloader_num_workers
            | self.train_dataset is not None
            | self._signature_columns | self.accelerator.dataloader_config.even_batches | self.data_collator is not None
            | self.args.accelerator_config.split_batches""",
        "get_eval_dataloader": """self.args.eval_batch_size | self.accelerator.even_batches
            | self.eval_dataset is not None""",
    },
    "sentence-transformers": {
        "evaluation_loop": """self.is_in_train | self.model.training | self.args.eval_batch_size | self.state.epoch
            | self.state.best_model_checkpoint is None | self.control.should_evaluate | self.state.best_metric
            | self.state.best_global_step""",
        "_save": """self.args.should_save | self.state.global_step | self.model.training
            | self.args.output_dir == folder""",
        "_load_best_model": """Path(self.state.best_model_checkpoint).name | self.is_in_train | self.state.best_metric
            | self.state.best_global_step""",
        "create_optimizer": """self.optimizer | self.args.learning_rate | self.is_deepspeed_enabled
            | self.model_wrapped is self.model | self.args.optim.value""",
    },
    "axolotl": {
        "_save_optimizer_and_scheduler": """self.lr_scheduler.state_dict()["last_epoch"] | self.state.global_step
            | self.optimizer.state_dict()["param_groups"][0]["lr"]""",
        "create_accelerator_and_postprocess": "self.args.gradient_accumulation_steps | self.args.world_size",
        "train": """self.control.should_training_stop | self.state.global_step | self.model_wrapped is self.model
            | self.accelerator.get_state_dict(self.model).keys() == self.model.state_dict().keys()""",
    },
    "others": {
        "get_batch_samples": "self.args.gradient_accumulation_steps | self.state.global_step",
        "predict": "self.is_in_train | self.model_wrapped is self.model | self.state.max_steps",
    },
}
IMPORTED = {
    "transformers": """Trainer TrainingArguments TrainerCallback TrainerState TrainerControl EvalPrediction
        EarlyStoppingCallback PrinterCallback ProgressCallback DefaultFlowCallback Seq2SeqTrainer
        Seq2SeqTrainingArguments IntervalStrategy SchedulerType set_seed get_scheduler default_data_collator""",
    "transformers.trainer_utils": """EvalPrediction EvalLoopOutput PredictionOutput TrainOutput HubStrategy has_length
        PREFIX_CHECKPOINT_DIR IntervalStrategy SaveStrategy get_last_checkpoint speed_metrics seed_worker BestRun""",
    "transformers.trainer_callback": """TrainerCallback CallbackHandler ExportableState TrainerState TrainerControl
        PrinterCallback ProgressCallback DefaultFlowCallback EarlyStoppingCallback""",
    "transformers.trainer_pt_utils": """LabelSmoother LengthGroupedSampler nested_detach nested_concat
        get_parameter_names""",
    "transformers.training_args": "TrainingArguments ParallelMode OptimizerNames",
}


def plain(value):
    """Convert a value for comparison. Objects become the names of their classes."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, (bool, int, float, type(None))):
        return value
    return str(value) if isinstance(value, str) else type(value).__name__


def read(expression, names):
    try:
        return plain(eval(expression, names))
    except AttributeError as error:
        return f"absent: {error}"


def by_method():
    expressions = defaultdict(list)
    for places in READ.values():
        for method, text in places.items():
            expressions[method] += [" ".join(expression.split()) for expression in text.split(" | ")]
    return expressions


def watching(base, folder, journal, found):
    """Make a subclass of a Trainer whose methods record when they are called, and what they can read."""
    expressions = by_method()

    def override(name, inherited):
        def method(self, *args, **kwargs):
            state, model = getattr(self, "state", None), getattr(self, "model", None)
            mode = model.training if isinstance(model, nn.Module) else None
            journal[name].append((getattr(state, "global_step", 0), mode, len(args), sorted(kwargs)))
            names = {"self": self, "model": args[0] if args else None, "torch": torch, "Path": Path, "folder": folder}
            for expression in expressions[name]:
                found[name, expression].append(read(expression, names))
            return inherited(*([] if is_static else [self]), *args, **kwargs)

        is_static = isinstance(inspect.getattr_static(base, name), staticmethod)
        return method

    methods = {name: override(name, getattr(base, name)) for name in " ".join(OVERRIDDEN.values()).split()}
    methods["tokenizer_or_none"] = lambda self: type(self.processing_class).__name__
    return type("Watching", (base,), methods)


def make_model():
    torch.manual_seed(2)
    return toy.tiny_bert()


def record(api, folder):
    """Train, evaluate, predict, save and resume with everything overridden."""
    journal, found = defaultdict(list), defaultdict(list)
    kind = watching(api.Trainer, str(folder), journal, found)
    values = {"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    values |= {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "save_total_limit": 3}
    values |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "load_best_model_at_end": True}
    values |= {"include_num_input_tokens_seen": "all", "num_train_epochs": 2}
    tokenizer = toy.tiny_tokenizer()
    data = {"train_dataset": _table(28), "eval_dataset": _table(10), "processing_class": tokenizer}
    trainer = kind(model_init=make_model, args=api.TrainingArguments(**values), **data)
    trainer.train()
    trainer.evaluate()
    trainer.predict([{"input_ids": row["input_ids"], "labels": 1} for row in toy.labelled_blocks(6)])
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", {"a": 1.0})
    trainer.save_metrics("train", {"a": 1.0})
    trainer.add_callback(api.EarlyStoppingCallback(3))
    trainer.remove_callback(api.EarlyStoppingCallback)
    trainer.pop_callback(trainer.callback_handler.callbacks[-1])
    trainer.create_model_card(model_name="x")
    trainer.get_learning_rates()
    args = api.TrainingArguments(**values | {"num_train_epochs": 3})
    trainer = kind(model_init=make_model, args=args, **data)  # its seed is that of the shuffling, too
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    return {"calls": journal, "reads": found}


def _table(count):
    import datasets

    return datasets.Dataset.from_list([{**row, "text": "a"} for row in toy.labelled_blocks(count)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [record(api, tmp_path_factory.mktemp("users")) for api in (transformers, hf_compat)]


@pytest.mark.parametrize("library", OVERRIDDEN)
def test_methods_are_called_at_upstreams_moments(recorded, library, capsys):
    theirs, ours = (run["calls"] for run in recorded)
    names = OVERRIDDEN[library].split()
    with capsys.disabled():
        print(f"\n{library}: {len(names)} methods, {sum(map(len, (ours[name] for name in names)))} calls")
    assert {name: (theirs[name], ours[name]) for name in names if theirs[name] != ours[name]}.keys() <= ANSWERS
    assert [name for name in names if not ours[name]] == []


ROWS = [(library, method) for library, places in READ.items() for method in places]


@pytest.mark.parametrize("library, method", ROWS)
def test_attributes_are_upstreams_where_they_are_read(recorded, library, method):
    theirs, ours = (run["reads"] for run in recorded)
    expressions = [" ".join(expression.split()) for expression in READ[library][method].split(" | ")]
    rows = [(expression, theirs[method, expression], ours[method, expression]) for expression in expressions]
    assert [row for row in rows if row[1] != row[2]] == []
    assert all(row[1] for row in rows)


@pytest.mark.parametrize("module", IMPORTED)
def test_names_are_imported_here_by_the_same_words(module):
    mirror = module.replace("transformers", "hf_compat")
    theirs, ours = importlib.import_module(module), importlib.import_module(mirror)
    names = IMPORTED[module].split()
    assert [name for name in names if hasattr(theirs, name) and not hasattr(ours, name)] == []
    for name in names:
        there, here = getattr(theirs, name), getattr(ours, name)
        assert there == here or there.__name__ == here.__name__


def test_a_dummy_evaluation_set_and_an_empty_loader(make_args):
    """sentence-transformers evaluates with `eval_dataset="dummy"` and an empty loader."""
    from transformers.trainer_utils import EvalLoopOutput

    class Evaluates(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader([])

        def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **kwargs):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            output.metrics[f"{metric_key_prefix}_spearman"] = 0.5
            assert isinstance(output, (hf_compat.hf.metrics.EvalLoopOutput, EvalLoopOutput))
            return output

    args = make_args(max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = Evaluates(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset="dummy")
    trainer.train()
    assert [log["eval_spearman"] for log in trainer.state.log_history if "eval_spearman" in log] == [0.5, 0.5]


def test_parameters_of_a_loss_are_trained_clipped_and_zeroed(make_args):
    """sentence-transformers' optimizer holds the parameters of the loss module and of the model."""

    class Loss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.scale = model, nn.Parameter(torch.tensor(4.0))

        def forward(self, batch):
            logits = self.model(batch["x"])["logits"]
            return nn.functional.cross_entropy(logits * self.scale, batch["labels"])

    def losses_of(base, api):
        class Trains(base):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.loss = Loss(self.model)

            def get_optimizer_cls_and_kwargs(self, args, model=None):
                kind, options = base.get_optimizer_cls_and_kwargs(args, model)
                options["optimizer_dict"] = [{"params": list(self.loss.parameters())}]
                return kind, options

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                if model == self.model_wrapped and model != self.model:
                    self.loss.model = model
                return self.loss(inputs)

        class Zeroes(api.TrainerCallback):
            def on_step_end(self, args, state, control, optimizer=None, **kwargs):
                optimizer.zero_grad()

        api.set_seed(1)
        values = {**make_args(max_steps=6, logging_steps=1).to_dict(), "gradient_accumulation_steps": 2}
        kept = ("output_dir", "max_steps", "logging_steps", "gradient_accumulation_steps", "use_cpu", "learning_rate")
        args = api.TrainingArguments(**{n: values[n] for n in kept}, report_to="none", save_strategy="no")
        trainer = Trains(toy.Classifier(), args, train_dataset=toy.rows(40), callbacks=[Zeroes])
        trainer.train()
        return [log.get("loss") for log in trainer.state.log_history], trainer.loss.scale.item()

    theirs, ours = losses_of(transformers.Trainer, transformers), losses_of(Trainer, hf_compat)
    assert theirs == ours and ours[1] != 4.0


def test_a_model_is_swapped_inside_the_loss_at_each_call_of_model_init(make_args):
    made = []

    class Makes(Trainer):
        def call_model_init(self, trial=None):
            made.append(trial)
            return super().call_model_init(trial=trial)

    trainer = Makes(args=make_args(max_steps=1), model_init=make_model_of_toys, train_dataset=toy.rows(8))
    first = trainer.model
    trainer.train()
    assert made == [None, None] and trainer.model is not first


def make_model_of_toys():
    return toy.Classifier()


def test_what_edits_the_trainers_source_is_refused():
    """axolotl and unsloth edit lines of the loop as text, and compile the result into the class."""
    names = {}
    exec(compile("def evaluation_loop(self, *args, **kwargs): return None", "<string>", "exec"), names)
    original = Trainer.evaluation_loop
    try:
        Trainer.evaluation_loop = names["evaluation_loop"]
        with pytest.raises(OverrideError, match="evaluation_loop"):
            refuse_edited_methods(Trainer)
    finally:
        Trainer.evaluation_loop = original
