"""Every argument that is set has an effect in a plain run, or is named with the reason when the training begins."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import logging
import types
import warnings

import pytest
import torch
from torch import nn

from helpers import toy
from helpers.parity.cases import CASES
from hf_compat import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from hf_compat.cli.configuration import choices_of
from hf_compat.engine.compiled_update import CompiledUpdate
from hf_compat.engine.evaluation import KeptBatches
from hf_compat.errors import HfCompatError, InertArgumentWarning
from hf_compat.hf.rows import OWN_ARGUMENTS
from hf_compat.hf.state import ExportableState
from hf_compat.plan.argument_support import inert_settings
from hf_compat.plan.translate import compilation_of
from hf_compat.tools.explanation import explain
from hf_compat.trainer_methods.run_parts import run_parts
from hf_compat.training_run.saver import Saver

# What changes nothing by itself, and need not be told.
NOT_TOLD = {
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "resume_from_checkpoint"), "a flag that scripts read"),
    "output_store": "what it changes is in another storage (`tests/training_run/test_uploads.py`)",
    "use_cpu": "it asks for what a machine without a GPU does anyway",
    "dataloader_pin_memory": "`use_cpu` switches it off as well",
    "parallelism_config": "an object of Accelerate, whose sizes have to fit the processes",
}
# A value of each other argument that is not its default.
AWAY = {
    name: not check.default
    for name, check in Seq2SeqTrainingArguments._checks().items()
    if isinstance(check.default, bool) and name not in NOT_TOLD
} | {
    "output_dir": "elsewhere", "per_device_train_batch_size": 3, "num_train_epochs": 2, "max_steps": 3,
    "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 3,
    "optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.5,
    "adam_epsilon": 1e-2, "optim_target_modules": ["outer"], "gradient_accumulation_steps": 2,
    "max_grad_norm": 1e-3, "label_smoothing_factor": 0.1, "tf32": False,
    "activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile_backend": "eager", "torch_compile_mode": "default",
    "liger_kernel_config": {"rope": True}, "neftune_noise_alpha": 5.0, "torch_empty_cache_steps": 1,
    "logging_strategy": "no", "logging_steps": 3, "include_num_input_tokens_seen": "all", "log_level": "debug",
    "log_level_replica": "error", "disable_tqdm": True, "report_to": "tensorboard", "run_name": "mine",
    "project": "mine", "trackio_space_id": "mine", "trackio_bucket_id": "mine", "trackio_static_space_id": "mine",
    "eval_strategy": "epoch", "eval_steps": 2, "eval_delay": 2, "per_device_eval_batch_size": 2,
    "eval_accumulation_steps": 1, "include_for_metrics": ["inputs"],
    "save_strategy": "no", "save_steps": 3, "save_total_limit": 1, "hub_token": "secret", "hub_private_repo": True,
    "hub_model_id": "me/mine", "hub_strategy": "end", "hub_revision": "mine",
    "metric_for_best_model": "count", "greater_is_better": True,
    "seed": 7, "data_seed": 7, "accelerator_config": {"use_seedable_sampler": False}, "dataloader_num_workers": 1,
    "dataloader_prefetch_factor": 3, "dataloader_multiprocessing_context": "fork",
    "label_names": ["other"], "train_sampling_strategy": "sequential",
    "length_column_name": "size", "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 3,
    "ddp_broadcast_buffers": True, "ddp_static_graph": True, "ddp_backend": "gloo", "ddp_timeout": 60,
    "fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "deepspeed": {"train_batch_size": 8},
    "debug": "underflow_overflow", "local_rank": 3, "generation_max_length": 5, "generation_num_beams": 2,
    "generation_config": {"max_length": 5},
}  # fmt: skip
# Of our own arguments, the first word of those that take words, and a number for others.
AWAY |= {name: [*choices_of(name), 3][0] for name in OWN_ARGUMENTS if name not in AWAY and name not in NOT_TOLD}
# Variables that `full_determinism` sets.
VARIABLES = (
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "ASCEND_LAUNCH_BLOCKING"),
    "HCCL_DETERMINISTIC",
)
SEEN: list[object] = []  # what a run has called


class Plain(toy.Tagger):
    """A tagger with what arguments reach in a model."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(use_cache=True)

    def get_input_embeddings(self):
        return self.embedding

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        SEEN.append(("checkpointing", gradient_checkpointing_kwargs))

    def forward(self, input_ids, attention_mask=None, labels=None):
        how = self.outer.weight.dtype, torch.are_deterministic_algorithms_enabled(), len(self.outer._forward_hooks)
        SEEN.append(("forward", len(input_ids), *how))
        out = super().forward(input_ids, attention_mask, labels)
        if self.training and labels is not None and not SEEN.count("nan") and len(SEEN) > 1:
            SEEN.append("nan")  # a loss that is not a number, with gradients that are
            out["loss"] = out["loss"] - out["loss"].detach() + float("nan")
        return out


def collate(rows):
    SEEN.append(sorted(rows[0]))
    return toy.pad([{name: value for name, value in row.items() if name != "extra"} for row in rows])


class Watcher(TrainerCallback):
    """Notes saves and predicted batches."""

    def on_save(self, args, state, control, **kwargs):
        SEEN.append(("save", state.global_step))

    def on_prediction_step(self, args, state, control, **kwargs):
        SEEN.append("predicted")


def metrics(prediction, compute_result=True):
    SEEN.append(("metrics", compute_result, prediction.inputs is None))
    return {"count": len(prediction.label_ids)}


@pytest.fixture(scope="module")
def spied():
    """Note calls whose effect a run on the CPU does not show."""
    with pytest.MonkeyPatch.context() as patch:
        import accelerate.utils.memory

        def spy(owner, name, makes=None):
            original = getattr(owner, name)

            def noting(*args, **kwargs):
                SEEN.append(name)
                return original(*args, **kwargs) if makes is None else makes(*args, **kwargs)

            patch.setattr(owner, name, noting)

        spy(KeptBatches, "to_cpu")
        spy(CompiledUpdate, "run", lambda self, *args: SEEN.append("compiled update"))
        spy(accelerate.utils.memory, "find_executable_batch_size")
        spy(Trainer, "compiled", lambda self, model: SEEN.append(compilation_of(self.args)) or model)
        spy(Trainer, "init_hf_repo", lambda self, token=None, private=None: None)
        spy(Trainer, "_push_from_checkpoint", lambda self, folder: None)
        spy(Trainer, "_finish_current_push", lambda self: None)
        where = Saver._where_and_when

        def noting(self, *args, **kwargs):
            found = where(self, *args, **kwargs)
            SEEN.append(str(found[-1]))
            return found

        patch.setattr(Saver, "_where_and_when", noting)
        yield


def run(folder, values):
    """Train, evaluate and predict. Return what was to be seen, and what was said."""
    SEEN.clear()
    given = {"output_dir": folder / "out", "num_train_epochs": 3, "save_steps": 2, "logging_steps": 2}
    given |= {"use_cpu": True, "learning_rate": 1e-2, "report_to": "none", **values}
    if values.get("output_dir"):
        given["output_dir"] = folder / values["output_dir"]
    torch.manual_seed(0)
    rows = [{**row, "extra": 1} for row in toy.sequences(13)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            args = Seq2SeqTrainingArguments(**given)
            trainer = Trainer(
                Plain(),
                args,
                data_collator=collate,
                train_dataset=rows,
                eval_dataset=rows[:10],
                compute_metrics=metrics,
                callbacks=[Watcher()],
            )
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                out = trainer.train()
            evaluated, predicted = trainer.evaluate(), trainer.predict(rows[:3])
        except HfCompatError as error:
            return None, str(error)
        finally:
            torch.use_deterministic_algorithms(False)
    logger, loader = logging.getLogger("hf_compat"), trainer.get_train_dataloader()
    seen = [
        *copy.deepcopy(SEEN),
        _timeless(trainer.state.log_history),
        *(sorted(out.metrics), trainer.state.global_step, trainer.state.best_metric, trainer.model.config.use_cache),
        *(_timeless([evaluated]), type(predicted.predictions), logger.level, loader.num_workers),
        [type(one).__name__ for one in trainer.callback_handler.callbacks],
        printed.getvalue().count("{"),
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name),
        [parameter.detach().flatten().tolist() for parameter in trainer.model.parameters()],
    ]
    logger.setLevel(logging.NOTSET)
    inert = [one for one in caught if issubclass(one.category, InertArgumentWarning)]
    return repr(seen), "\n".join(str(one.message) for one in inert)


def _timeless(entries):
    slow = ("runtime", "per_second", "preparation_time", "flos")
    return [{k: v for k, v in one.items() if not any(word in k for word in slow)} for one in entries]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, spied):
    seen, told = run(tmp_path_factory.mktemp("plain"), {})
    assert "Without effect" not in told
    return seen


def test_a_value_of_every_argument_is_tried():
    fields = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert set(AWAY) | set(NOT_TOLD) == fields | set(OWN_ARGUMENTS)


OF_A_RESUME = ("ignore_data_skip", "restore_callback_states_from_checkpoint")


@pytest.mark.parametrize("name", [name for name in AWAY if name not in OF_A_RESUME])
def test_an_argument_changes_a_plain_run_or_is_named(tmp_path, plain, monkeypatch, name):
    for variable in VARIABLES if name == "full_determinism" else ():
        monkeypatch.setenv(variable, "")
    seen, told = run(tmp_path, {name: AWAY[name]})
    if name == "output_dir":
        assert (tmp_path / "elsewhere" / "checkpoint-2").is_dir()
    elif seen is None:
        assert name in told
    else:
        # neither in silence nor named in spite of an effect
        assert (seen != plain) != (f"`{name}=" in told), told


def named(args_or_trainer):
    """The settings without effect and their reasons."""
    trainer = args_or_trainer
    found = (
        inert_settings(trainer.args, run_parts(trainer)) if isinstance(trainer, Trainer) else inert_settings(trainer)
    )
    return {one.name: one.why for one in found}


def sgd(model, **values):
    return torch.optim.SGD(model.parameters(), lr=0.1, **values)


def test_a_run_names_all_settings_without_effect_in_one_line(make_args):
    args = make_args(eval_steps=3, eval_delay=2, save_total_limit=2, lr_scheduler_type="constant", warmup_steps=4)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
        trainer.train()
    (told,) = [one for one in caught if issubclass(one.category, InertArgumentWarning)]
    assert str(told.message) == (
        "Without effect in this run: `warmup_steps=4` (the schedule 'constant' has no warm-up); `eval_steps=3` "
        "(`eval_strategy` is not 'steps'); `eval_delay=2` (`eval_strategy='no'` evaluates nothing while training); "
        "`save_total_limit=2` (`save_strategy='no'` saves no checkpoint)."
    )
    assert told.filename == __file__


def test_what_the_user_passes_beside_arguments_takes_their_effect(make_args):
    model = toy.Classifier()
    values = {"weight_decay": 0.1, "adam_beta1": 0.5, "warmup_steps": 2, "optim": "sgd", "label_smoothing_factor": 0.1}
    args, data = make_args(lr_scheduler_type="cosine", **values), toy.rows(8)
    own = Trainer(model, args, train_dataset=data, optimizers=(sgd(model), None), compute_loss_func=torch.nn.MSELoss())
    assert set(named(own)) == {"learning_rate", "weight_decay", "adam_beta1", "optim", "label_smoothing_factor"}

    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs)["loss"]

    class Smoothing(OwnLoss):
        def compute_loss(self, model, inputs, *given, **more):
            return super().compute_loss(model, inputs, *given, **more)

    reason = "your own `compute_loss` computes the loss"
    assert named(OwnLoss(model, args, train_dataset=data))["label_smoothing_factor"] == reason
    assert "label_smoothing_factor" not in named(Smoothing(model, args, train_dataset=data))
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd(model))
    own = Trainer(model, args, train_dataset=data, optimizers=(schedule.optimizer, schedule))
    assert {"lr_scheduler_type", "warmup_steps"} <= set(named(own))
    by_class = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}))
    assert set(named(by_class)) == {"learning_rate", "adam_beta1", "optim"}
    assert named(args) == {"adam_beta1": "`optim='sgd'` does not read it"}
    assert "lr_scheduler_kwargs" in named(make_args(lr_scheduler_type="constant", lr_scheduler_kwargs={"power": 2}))


@pytest.mark.parametrize(
    ("optim", "unread"),
    [
        ("adamw_torch", set()),
        ("sgd", {"adam_beta1", "adam_beta2", "adam_epsilon"}),
        ("adafactor", {"adam_beta1", "adam_beta2", "adam_epsilon"}),
        ("lion_32bit", {"adam_epsilon"}),
        ("lomo", {"weight_decay", "max_grad_norm"}),
    ],
)
def test_arguments_that_an_optimizer_does_not_read_are_named(make_args, optim, unread):
    values = {"weight_decay": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "max_grad_norm": 0.5}
    assert set(named(make_args(optim=optim, **values))) == unread


def test_a_schedule_free_optimizer_reads_the_warm_up_of_a_constant_schedule(make_args):
    values = {"lr_scheduler_type": "constant", "warmup_steps": 5}
    assert set(named(make_args(**values))) == {"warmup_steps"}
    assert not named(make_args(optim="schedule_free_adamw", **values))


def test_a_stream_has_its_own_order_and_keeps_its_last_batch(make_args):
    args = make_args(max_steps=2, num_train_epochs=3.0, data_seed=7, dataloader_drop_last=True)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.Stream(toy.rows(8)))
    assert set(named(trainer)) == {"data_seed", "dataloader_drop_last"}
    trainer.eval_dataset = toy.rows(4)
    assert set(named(trainer)) == {"data_seed"}


def test_what_own_code_mentions_may_have_an_effect(make_args):
    class Saving(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = True

    args = make_args(save_total_limit=2, eval_delay=3)
    assert set(named(Trainer(toy.Classifier(), args))) == {"save_total_limit", "eval_delay"}
    assert set(named(Trainer(toy.Classifier(), args, callbacks=[Saving()]))) == {"eval_delay"}

    class Delaying(Trainer):
        def evaluate(self, *given, **kwargs):
            return super().evaluate(*given, **kwargs) if self.state.epoch > self.args.eval_delay else {}

    assert set(named(Delaying(toy.Classifier(), args))) == {"save_total_limit"}

    def timed(function):
        @functools.wraps(function)
        def call(*given, **kwargs):
            return function(*given, **kwargs)

        return call

    class Decorated(Trainer):
        evaluate = timed(Delaying.evaluate)
        compute_loss = timed(Trainer.compute_loss)

        @property
        def limit(self):
            return self.args.save_total_limit

    assert not named(Decorated(toy.Classifier(), args))
    smoothing = make_args(label_smoothing_factor=0.1)
    assert not named(Decorated(toy.Classifier(), smoothing)), "the method calls ours, which smooths"

    class OwnLoss(Trainer):
        @timed
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs)["loss"]

    assert set(named(OwnLoss(toy.Classifier(), smoothing))) == {"label_smoothing_factor"}


def test_values_that_follow_from_others_are_not_named(make_args, tmp_path):
    assert not named(make_args(eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True))
    assert not named(make_args(logging_strategy="no", logging_steps=500, eval_strategy="steps"))
    assert set(named(make_args(logging_strategy="epoch", logging_steps=3))) == {"logging_steps"}
    assert not named(make_args(logging_strategy="epoch", logging_steps=3, eval_strategy="steps"))
    assert not named(TrainingArguments(tmp_path, compat="4", use_cpu=True))


def test_an_evaluation_alone_names_what_concerns_evaluations(make_args):
    args = make_args(fp16=True, save_total_limit=3, include_for_metrics=["loss"])
    trainer = Trainer(toy.Classifier(), args, eval_dataset=toy.rows(4))
    with pytest.warns(InertArgumentWarning) as caught:
        trainer.evaluate()
        trainer.evaluate()
    (told,) = caught
    assert "`fp16=True`" in str(told.message) and "`include_for_metrics=['loss']`" in str(told.message)
    assert "save_total_limit" not in str(told.message)


def test_generation_without_predict_with_generate_is_named(tmp_path):
    args = Seq2SeqTrainingArguments(tmp_path, use_cpu=True, generation_num_beams=2)
    assert named(Seq2SeqTrainer(nn.Linear(1, 1), args)) == {"generation_num_beams": "`predict_with_generate` is off"}


def test_explain_and_preflight_say_what_has_no_effect_here(make_args):
    model = toy.Classifier()
    args = make_args(adam_beta1=0.5, async_save=True)
    effects = {one.name: one.becomes for one in explain(args).arguments}
    assert effects["adam_beta1"] == "optimizer"
    assert effects["async_save"] == "no effect here: `save_strategy='no'` saves no checkpoint"
    trainer = Trainer(model, args, train_dataset=toy.rows(8), optimizers=(sgd(model), None))
    effects = {one.name: one.becomes for one in explain(args, parts=run_parts(trainer)).arguments}
    assert effects["adam_beta1"] == "no effect here: you pass an optimizer"
    notes = [one.problem for one in trainer.preflight().notes]
    assert "`adam_beta1=0.5` has no effect: you pass an optimizer." in notes


def test_own_arguments_are_dumped_when_they_are_set(make_args):
    args = make_args(async_save=True, eval_loss_by_token=True)
    assert args.to_dict()["async_save"] is args.to_dict()["eval_loss_by_token"] is True
    assert "async_save=True" in repr(args)
    again = TrainingArguments(**{**args.to_dict(), "hub_token": None})
    assert again.async_save and again.eval_loss_by_token
    assert not OWN_ARGUMENTS.keys() & make_args().to_dict().keys()


@pytest.mark.parametrize("name", OF_A_RESUME)
def test_an_argument_of_a_resume_has_an_effect_there(make_args, name):
    class Counting(TrainerCallback, ExportableState):
        def __init__(self, count=0):
            self.count = count

        def on_step_end(self, args, state, control, **kwargs):
            self.count += 1

        def state(self):
            return {"args": {}, "attributes": {"count": self.count}}

    def resumed(**values):
        args = make_args(save_strategy="steps", save_steps=3, **values)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(24), callbacks=[Counting()])
        assert not named(trainer)
        begins = values == start
        trainer.train(resume_from_checkpoint=None if begins else f"{args.output_dir}/checkpoint-3")
        (counting,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, Counting)]
        return counting.count, toy_weights(trainer.model)

    start = {"num_train_epochs": 1}
    resumed(**start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = resumed()
        other = resumed(**{name: True})
    assert plain != other


def toy_weights(model):
    return [parameter.tolist() for parameter in model.parameters()]


# Settings that configurations of the parity tests rightly name.
TOLD_OF = {
    "num_train_epochs": "max_steps_within_epoch max_steps_over_epochs stream_without_length stream_that_ends "
    "stream_with_leftover_windows stream_told_its_epoch without_the_default_flow each_metric_over_each_data",
    "logging_steps": "logging_by_epoch logging_off flags_of_a_callback",
    "torch_empty_cache_steps": "empty_cache",
    "average_tokens_across_devices": "causal_lm_tokens_of_this_device",
    "run_name": "named_run",
    "fp16": "fp16_on_the_cpu",
    "eval_steps": "compiled_twice compiled_by_its_mode evaluated_compiled",
    "generation_max_length": "seq2seq_without_generation",
    "sortish_sampler": "seq2seq_sortish",
}


def test_only_these_configurations_of_the_parity_tests_name_a_setting(tmp_path):
    found: dict[str, list[str]] = {}
    for name, case in CASES.items():
        args = Seq2SeqTrainingArguments(**{"output_dir": str(tmp_path), **case["args"]})
        for one in inert_settings(args):
            found.setdefault(one.name, []).append(name)
    assert found == {name: cases.split() for name, cases in TOLD_OF.items()}
