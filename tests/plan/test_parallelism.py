"""`parallelism_config`: copies and shards are DDP, FSDP 2 and both; other dimensions are refused with the reason."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig

from helpers import toy
from hf_compat import Trainer, explain, translate
from hf_compat.errors import ArgumentError, HfCompatError, UnsupportedArgument
from hf_compat.plan.parallelism import SequencePlan, asked_sizes, check_shared_model, parallel_sizes, sequence_plan

FSDP = {"fsdp": True}
ZERO = {"deepspeed": {"zero_optimization": {"stage": 2}}}
ZERO_OF_PARTS = {"deepspeed": {**ZERO["deepspeed"], "tensor_parallel": {"autotp_size": 2}}}


@pytest.mark.parametrize(
    ("sizes", "values", "strategy", "parts"),
    [
        ({}, {}, "ddp", None),
        ({"dp_replicate_size": 8}, {}, "ddp", None),
        ({}, FSDP, "fsdp2", (False, None)),
        ({"dp_shard_size": 8}, FSDP, "fsdp2", (False, 8)),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, FSDP, "fsdp2", (True, 4)),
    ],
)
def test_copies_and_shards_become_a_strategy(args_of, sizes, values, strategy, parts):
    plan = translate(args_of(parallelism_config=ParallelismConfig(**sizes), **values))
    assert plan.strategy == strategy
    if parts is not None:
        assert (plan.strategy_options["plan"].hybrid, plan.strategy_options["plan"].shard_size) == parts


@pytest.mark.parametrize(
    ("sizes", "values", "words"),
    [
        (
            {"cp_size": 2},
            FSDP,
            "(?s)cp_size=2: torch's `context_parallel`.*no kernel for CPUs.*several GPUs and FSDP 2",
        ),
        ({"sp_size": 4}, {}, "(?s)sp_size=4: DeepSpeed shares.*`deepspeed` is not set"),
        ({"sp_size": 4}, ZERO, "sp_size=4 and 1 copies .*, for 4 processes; the launcher has started 8"),
        ({"sp_size": 2, "tp_size": 4}, ZERO, "sp_size=2, and layers are split between processes, too"),
        ({"sp_size": 2, "dp_shard_size": 4}, ZERO_OF_PARTS, "sp_size=2, and layers are split between processes, too"),
        ({"sp_size": 8}, {**ZERO, "label_smoothing_factor": 0.1}, "sp_size=8, and `label_smoothing_factor=0.1`"),
        ({"dp_replicate_size": 4}, {}, "for 4 processes; the launcher has started 8"),
        ({"dp_shard_size": 2, "tp_size": 2}, FSDP, "for 4 processes; the launcher has started 8"),
        ({"dp_shard_size": 8}, {}, "`fsdp` is off"),
        ({"dp_replicate_size": 8}, FSDP, "`fsdp` is on"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(args_of, sizes, values, words):
    args = args_of(parallelism_config=ParallelismConfig(**sizes), **values)
    with pytest.raises(HfCompatError, match=words) as raised:
        translate(args)
    assert "Hint" in str(raised.value) and str(raised.value) in explain(args).refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reshard_after_forward": False}, "counts for `state_dict_type` alone"),
        ({"state_dict_type": "FULL_STATE_DICT"}, None),
    ],
)
def test_other_shards_than_those_of_a_loaded_model_are_not_made(args_of, recwarn, options, words):
    model = toy.Classifier()
    model.is_distributed_loading_by_transformers = True
    plan = translate(args_of(fsdp=True, fsdp_config=options), model=model)
    told = [
        str(warning.message) for warning in recwarn if "`from_pretrained` has sharded the model" in str(warning.message)
    ]
    assert plan.strategy == "fsdp2" and plan.strategy_options["plan"].reshard_after_forward
    assert not told if words is None else words in told[0]


def test_a_trainer_refuses_it_when_it_is_made(make_args):
    args = make_args(parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ArgumentError, match="tp_size=2, and 1 processes share each layer of the model"):
        Trainer(toy.Classifier(), args)


def test_one_process_trains_with_sizes_of_one(make_args):
    trainer = Trainer(toy.Classifier(), make_args(parallelism_config=ParallelismConfig()), train_dataset=toy.rows(8))
    assert trainer.accelerator.parallelism_config is trainer.args.parallelism_config
    trainer.train()
    assert trainer.state.global_step == 4


def test_the_launchers_variables_are_read_as_accelerate_reads_them(args_of):
    on = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "8"}
    assert parallel_sizes(args_of(), on, None) == (8, 1)
    assert parallel_sizes(args_of(), {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3"}, None) is None
    with pytest.raises(UnsupportedArgument, match="cp_size=2"):
        parallel_sizes(args_of(), {**on, "PARALLELISM_CONFIG_CP_SIZE": "2"}, None)
    with pytest.raises(ArgumentError, match="PARALLELISM_CONFIG_DP_SHARD_SIZE=no"):
        parallel_sizes(args_of(), {**on, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "no"}, None)


def test_processes_that_share_sequences_are_one_in_the_count_of_samples(args_of):
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=64, sp_seq_length_is_variable=False)
    shared = ParallelismConfig(sp_size=4, dp_replicate_size=2, sp_handler=handler)
    config = {**ZERO["deepspeed"], "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    args = args_of(
        parallelism_config=shared, deepspeed=config, per_device_train_batch_size=3, gradient_accumulation_steps=5
    )
    plan = translate(args)
    assert plan.sequence == SequencePlan(sp_size=4, length=64)
    assert plan.strategy_options["config"]["train_batch_size"] == 3 * 5 * 2
    on = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "8"}
    of_launcher = args_of(**ZERO)
    assert sequence_plan(of_launcher, on) == SequencePlan(sp_size=8)
    fixed = on | {"PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "false"}
    known = {"PARALLELISM_CONFIG_SP_SEQ_LENGTH": "32", "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa"}
    assert sequence_plan(of_launcher, fixed | known) == SequencePlan(sp_size=8, length=32, attention="sdpa")
    with pytest.raises(ArgumentError, match="one length that is not given"):
        sequence_plan(of_launcher, fixed)


@pytest.mark.parametrize(
    ("config", "attention", "words"),
    [
        (None, None, "Linear has no `config`"),
        ({"layer_types": ["full_attention", "linear_attention"]}, None, "has layers of linear_attention"),
        ({"_attn_implementation": "eager"}, None, "the model's attention is 'eager'"),
        ({"_attn_implementation": "sdpa"}, "flash_attention_2", "sp_attn_implementation='flash_attention_2', while"),
    ],
)
def test_models_whose_sequences_cannot_be_shared_are_refused(config, attention, words):
    model, plan = torch.nn.Linear(1, 1), SequencePlan(sp_size=2, attention=attention)
    if config is not None:
        model.config = SimpleNamespace(**config)
    with pytest.raises(HfCompatError, match=words):
        check_shared_model(model, plan)
    model.config = SimpleNamespace(_attn_implementation="sdpa", layer_types=["full_attention"])
    check_shared_model(model, SequencePlan(sp_size=2))


def test_a_loss_function_beside_shared_sequences_is_refused(make_args):
    trainer = Trainer(toy.Classifier(), make_args(), compute_loss_func=lambda outputs, labels: outputs["loss"])
    trainer._validate_args()
    trainer.accelerator.sequence = SequencePlan(sp_size=2)
    with pytest.raises(UnsupportedArgument, match=r"`compute_loss_func` is set, and processes share"):
        trainer._validate_args()


def asking(sizes, **values):
    """Arguments that ask for sizes of a mesh, and nothing else."""
    every = {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 1, "sp_size": 1, "sp_handler": None}
    args = {"deepspeed": None, "fsdp": None, "label_smoothing_factor": 0.0, "world_size": 4}
    return SimpleNamespace(parallelism_config=SimpleNamespace(**(every | sizes)), **(args | values))


def handler(length, is_variable, attention=None):
    names = {"sp_seq_length": length, "sp_seq_length_is_variable": is_variable, "sp_attn_implementation": attention}
    return {"sp_handler": SimpleNamespace(**names)}


def by_launcher(length, is_variable, attention=None):
    names = {"SP_SEQ_LENGTH": length, "SP_SEQ_LENGTH_IS_VARIABLE": is_variable, "SP_ATTN_IMPLEMENTATION": attention}
    return {f"PARALLELISM_CONFIG_{name}": text for name, text in names.items() if text is not None}


@pytest.mark.parametrize(
    ("sizes", "values", "variables", "found"),
    [
        ({}, {}, {}, (None, None)),
        ({"sp_size": 1}, {}, {}, None),
        ({}, {"deepspeed": None}, {}, "`deepspeed` is not set"),
        ({}, {"deepspeed": None}, {"ACCELERATE_USE_DEEPSPEED": "true"}, (None, None)),
        ({"tp_size": 2}, {}, {}, "layers are split"),
        ({}, ZERO_OF_PARTS, {}, "layers are split"),
        ({}, {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1"),
        ({"dp_replicate_size": 2}, {"world_size": 8}, {}, (None, None)),
        ({"dp_shard_size": 2}, {"world_size": 8}, {}, (None, None)),
        ({"dp_replicate_size": 2}, {}, {}, "for 8 processes"),
        (handler(16, False, "sdpa"), {}, {}, (16, "sdpa")),
        (handler(16, True), {}, {}, (None, None)),
        (handler(None, True), {}, {}, (None, None)),
        (handler(None, False), {}, {}, "is not given"),
        ({}, {}, by_launcher("16", "FALSE", "sdpa"), (16, "sdpa")),
        ({}, {}, by_launcher("16", "True"), (None, None)),
        ({}, {}, by_launcher("16", None), (None, None)),
        ({}, {}, by_launcher("None", "false"), "is not given"),
    ],
)
def test_how_processes_share_sequences(sizes, values, variables, found):
    args = asking({"sp_size": 4} | sizes, **(ZERO | values))
    try:
        plan = sequence_plan(args, variables)
        assert plan is None if found is None else (plan.sp_size, plan.length, plan.attention) == (4, *found)
    except HfCompatError as error:
        assert isinstance(found, str) and found in str(error)


@pytest.mark.parametrize(
    ("sizes", "values", "split", "found"),
    [
        ({}, {}, None, None),
        ({"cp_size": 2}, FSDP, None, "cp_size=2"),
        ({"sp_size": 4, "dp_shard_size": 1}, ZERO, None, None),
        ({"tp_size": 2}, {}, 2, None),
        ({"tp_size": 2}, {}, 4, "tp_size=2, and 4 processes share"),
        ({"tp_size": 1}, {}, 4, None),
        ({"dp_shard_size": 2, "tp_size": 2}, FSDP, 2, (1, 2)),
        ({"dp_shard_size": 2}, FSDP, 2, (1, 2)),
        ({"dp_shard_size": 2, "tp_size": 2}, FSDP, None, (1, 2)),
        ({"dp_shard_size": 2}, FSDP, None, "for 2 processes"),
        ({"dp_replicate_size": 4}, {}, None, (4, 1)),
        ({"dp_replicate_size": 4}, FSDP, None, "`fsdp` is on"),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, {}, None, "`fsdp` is off"),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, FSDP, None, (2, 2)),
    ],
)
def test_the_copies_and_shards_of_a_model(sizes, values, split, found):
    try:
        assert parallel_sizes(asking(sizes, **values), {}, split) == found
    except HfCompatError as error:
        assert isinstance(found, str) and found in str(error)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, {}),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "false", "PARALLELISM_CONFIG_TP_SIZE": "0"}, {}),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, 1),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "1"}, 1),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}, 2),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "0"}, None),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "x"}, None),
    ],
)
def test_sizes_of_the_launcher(variables, found):
    try:
        sizes = asked_sizes(SimpleNamespace(parallelism_config=None), variables)
        assert sizes == {} if found == {} else sizes["tp_size"] == found and sizes["dp_shard_size"] == 1
    except ArgumentError:
        assert found is None
