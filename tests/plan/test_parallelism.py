"""`parallelism_config`: copies and shards are DDP, FSDP 2 and both; other dimensions are refused with the reason."""

import pytest
from accelerate import ParallelismConfig

from helpers import toy
from hf_compat import Trainer, explain, translate
from hf_compat.errors import ArgumentError, HfCompatError, UnsupportedArgument
from hf_compat.plan.translate import parallel_sizes

FSDP = {"fsdp": True}


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
        ({"cp_size": 2}, FSDP, "(?s)cp_size=2: context.*needs several GPUs and FSDP 2"),
        ({"sp_size": 4}, {}, "(?s)sp_size=4: sequence.*needs DeepSpeed on several GPUs"),
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
