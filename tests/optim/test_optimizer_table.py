"""Every optimizer name makes transformers' class with transformers' keywords; stand-ins are in the packages' places."""

import logging
import sys
import types

import pytest
import torch
import transformers
from torch import nn
from transformers.training_args import OptimizerNames as UpstreamNames

from helpers import optimizer_stand_ins
from hf_compat import HFModule, Trainer, TrainingArguments, explain
from hf_compat.errors import ArgumentError, MissingOptimizer, UnsupportedArgument
from hf_compat.hf.enums import OWN_OPTIMIZERS, OptimizerNames
from hf_compat.optim.optimizers import OPTIMIZERS, check_request, unread_arguments
from hf_compat.plan.argument_support import check_optimizer

# What is given in `optim_args`, by the beginning of a name: every option of every optimizer once.
OPTIONS = {
    "adamw_torch_4bit": "block_size=128,bf16_stochastic_round=true",
    "adamw_torch_8bit": "block_size=128,bf16_stochastic_round=False",
    "adamw_anyprecision": "use_kahan_summation=true,momentum_dtype=float16,variance_dtype=bfloat16,"
    "compensation_buffer_dtype=float32",
    "ademamix": "beta1=0.8,beta2=0.9,beta3=0.99,alpha=4,eps=1e-7,t_alpha=10,t_beta3=20",
    "paged_ademamix": "beta3=0.99,t_alpha=10",
    "rmsprop_bnb": "alpha=0.9,eps=1e-7,momentum=0.5,weight_decay=0.1,centered=False,min_8bit_size=100",
    "rmsprop": "momentum=0.9,alpha=0.5,eps=1e-6,weight_decay=0.1,centered=true",
    "sgd": "momentum=0.9, weight_decay=0.1, nesterov=True",
    "adagrad": "lr_decay=0.1,weight_decay=0.1,eps=1e-6",
    "galore": "rank=4, update_proj_gap=10, scale=0.5, proj_type=reverse_std",
    "apollo": "rank=4,proj=svd,scale_type=tensor,update_proj_gap=10,scale=2,proj_type=left",
    "grokadamw": "alpha_init=0.9,lamb=3,gamma=0.2,grokking_signal_decay_rate=0.3,gradient_clipping=0.5",
    "stable_adamw": "decouple_lr=True,max_lr=0.1,kahan_sum=True",
    "schedule_free": "weight_lr_power=1.5,r=0.5",
}
# transformers hands these on as text, which the optimizer cannot work with.
TEXT_THERE = {"block_size", "alpha", "eps", "momentum", "weight_decay", "centered", "min_8bit_size"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])
        self.attention = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "v_proj": nn.Linear(4, 4, bias=False)})
        self.head = nn.Linear(4, 2)


def both(make_args, monkeypatch, **settings):
    """Our and transformers' answer for the same settings, with a stand-in for the package."""
    settings = {"learning_rate": 3e-3, "adam_beta1": 0.7, "adam_beta2": 0.8, "adam_epsilon": 1e-5, **settings}
    if settings["optim"].startswith(("galore", "apollo")):
        settings.setdefault("optim_target_modules", "all-linear")
    model = Model()
    ours, theirs = make_args(**settings), transformers.TrainingArguments("unused", use_cpu=True, **settings)
    optimizer_stand_ins.install(monkeypatch, settings["optim"])
    return (
        Trainer.get_optimizer_cls_and_kwargs(ours, model),
        transformers.Trainer.get_optimizer_cls_and_kwargs(theirs, model),
    )


def parts(value):
    """Groups with the identities of their parameters, which cannot be compared by value."""
    if isinstance(value, list):
        return [parts(item) for item in value]
    if isinstance(value, dict):
        return {str(key): parts(item) for key, item in value.items()}
    return id(value) if isinstance(value, (torch.Tensor, nn.Module)) else value


def options_for(name):
    found = [start for start in OPTIONS if name.startswith(start)]
    return OPTIONS[max(found, key=len)] if found else None


def check_equal(ours, theirs):
    assert ours[0] is theirs[0]
    assert parts(ours[1]) == parts(theirs[1])


# An optimizer that is stepped in hooks has a class of ours (`test_layerwise.py`).
CONSTRUCTED = [name.value for name in OptimizerNames if not name.value.endswith("layerwise")]


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_class_and_keywords_without_options(make_args, monkeypatch, name):
    check_equal(*both(make_args, monkeypatch, optim=name))


@pytest.mark.parametrize("name", [name for name in CONSTRUCTED if options_for(name)])
def test_class_and_keywords_with_every_option(make_args, monkeypatch, name):
    ours, theirs = both(make_args, monkeypatch, optim=name, optim_args=options_for(name))
    for key, value in theirs[1].items():
        if isinstance(value, str) and key in TEXT_THERE:
            theirs[1][key] = (value == "True") if value in ("True", "False") else type(ours[1][key])(float(value))
    check_equal(ours, theirs)


def test_adafactor_is_transformers_class_and_without_it_that_is_said(make_args, monkeypatch):
    assert isinstance(Trainer(Model(), make_args(optim="adafactor")).create_optimizer(), transformers.Adafactor)
    monkeypatch.setitem(sys.modules, "transformers.optimization", None)  # as where its import is blocked
    with pytest.raises(MissingOptimizer, match=r"pip install 'transformers>="):
        Trainer(Model(), make_args(optim="adafactor"))


def test_the_table_has_every_name_of_transformers_and_ours():
    assert set(OPTIMIZERS) == {name.value for name in UpstreamNames} | set(OWN_OPTIMIZERS)
    assert {name.value for name in OptimizerNames} == {name.value for name in UpstreamNames}


def needs_package(name):
    return OPTIMIZERS[name].path.partition(".")[0] not in ("torch", "transformers", "hf_compat")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if needs_package(name)])
def test_a_missing_package_is_named_with_its_pip_line_when_a_trainer_is_made(make_args, monkeypatch, name):
    optimizer_stand_ins.remove(monkeypatch)
    args = make_args(optim=name, optim_target_modules="all-linear")
    entry = OPTIMIZERS[name]
    with pytest.raises(MissingOptimizer) as caught:
        Trainer(Model(), args, train_dataset=[1, 2])
    assert f"`optim='{name}'` needs" in str(caught.value)
    assert f"pip install {entry.install}" in str(caught.value) and entry.path.partition(".")[0] in str(caught.value)
    assert isinstance(caught.value, (ImportError, ValueError))  # transformers raises one or the other


def test_a_package_that_is_too_old_says_what_it_lacks(make_args, monkeypatch):
    optimizer_stand_ins.install(monkeypatch, "ademamix")
    import bitsandbytes.optim

    monkeypatch.delattr(bitsandbytes.optim, "AdEMAMix")
    with pytest.raises(MissingOptimizer, match="AdEMAMix of the package bitsandbytes"):
        check_request(make_args(optim="ademamix"))


def test_torchao_before_0_11_is_refused_with_the_release_that_works(make_args, monkeypatch):
    optimizer_stand_ins.install(monkeypatch, "adamw_torch_8bit")
    monkeypatch.setitem(sys.modules, "torchao.optim", None)  # the classes were in `torchao.prototype`
    with pytest.raises(MissingOptimizer, match=r"AdamW8bit of(.|\n)*pip install 'torchao>=0.11"):
        check_request(make_args(optim="adamw_torch_8bit"))


@pytest.mark.parametrize(
    "optim, optim_args, text",
    [
        ("ademamix", "t_alpha=soon", "`optim_args: t_alpha='soon'` is not a whole number >= 1"),
        ("galore_adamw", "rank=0", "`optim_args: rank='0'` is not a whole number >= 1"),
        ("galore_adamw", "proj_type=up", "`optim_args: proj_type='up'` is not known.\n\nHint: choose one of 'std'"),
        ("apollo_adamw", "projection=svd", "has projection, but .* takes rank, proj"),
        ("stable_adamw", "kahan_sum=often", "kahan_sum='often'` is not true or false"),
        ("adamw_anyprecision", "momentum_dtype=int8", "momentum_dtype='int8'` is not known"),
        ("lion_8bit", "rank=3", "has rank, but `optim='lion_8bit'` takes no options"),
        ("adamw_torch_8bit", "block_size=128,block_size=256", "has block_size twice"),
        ("grokadamw", "=3", "has the part '=3'"),
    ],
)
def test_options_are_read_by_their_types(make_args, monkeypatch, optim, optim_args, text):
    optimizer_stand_ins.install(monkeypatch, optim)
    with pytest.raises(ArgumentError, match=text):
        check_request(make_args(optim=optim, optim_args=optim_args, optim_target_modules="all-linear"))


LOW_RANK = ("galore_adamw", "galore_adafactor", "apollo_adamw")


@pytest.mark.parametrize("optim", LOW_RANK)
@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        "all_linear",
        ".*q_proj",
        "head",
        ["q_proj", "layers"],
        ["attention.q_proj"],
        [".*_proj", "head"],
        [r"layers\.\d"],
    ],
)
def test_the_groups_of_target_modules(make_args, monkeypatch, caplog, optim, targets):
    with caplog.at_level(logging.WARNING), caplog.at_level(logging.WARNING, logger="transformers"):
        check_equal(*both(make_args, monkeypatch, optim=optim, optim_target_modules=targets))
    ours = [record.args[0] for record in caplog.records if record.name.startswith("hf_compat")]
    theirs = [record.message.split()[0] for record in caplog.records if record.name.startswith("transformers")]
    assert ours == theirs  # modules that are named and are no linear layers
    assert ("layers" in ours) == (targets == ["q_proj", "layers"])


@pytest.mark.parametrize(
    "targets, text",
    [
        (None, "needs `optim_target_modules`"),
        ("q_proj", "matches no linear layer"),
        (["nothing"], "matches no linear layer"),
        ([], "names no module"),
        ("embedding", "matches no linear layer"),
        ("(", r"'\(' is not a regular expression"),
    ],
)
def test_target_modules_that_cannot_work_are_refused_when_a_trainer_is_made(make_args, monkeypatch, targets, text):
    optimizer_stand_ins.install(monkeypatch, "galore_adamw")
    with pytest.raises(ArgumentError, match=text):  # of the arguments already, where they cannot fit any model
        Trainer(Model(), make_args(optim="galore_adamw", optim_target_modules=targets), train_dataset=[1, 2])


def test_low_rank_without_a_model_is_refused_as_transformers_does(make_args, monkeypatch):
    optimizer_stand_ins.install(monkeypatch, "apollo_adamw")
    args = make_args(optim="apollo_adamw", optim_target_modules="all-linear")
    with pytest.raises(ValueError, match="there is no model"):
        Trainer.get_optimizer_cls_and_kwargs(args)
    assert check_optimizer(args) is None  # a model_init may bring one


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if OPTIMIZERS[name].device])
def test_an_optimizer_of_another_chip_is_refused_on_the_cpu(make_args, monkeypatch, name):
    args = make_args(optim=name, optim_target_modules="all-linear")
    optimizer_stand_ins.install(monkeypatch, name)
    with pytest.raises(NotImplementedError, match=f"`optim='{name}'` needs .*this run is on the CPU"):
        check_request(args)


def test_target_modules_of_another_optimizer_are_warned_of(make_args):
    args = make_args(optim="sgd", optim_target_modules="all-linear")
    check_request(args)
    assert unread_arguments(args)["optim_target_modules"].startswith("`optim='sgd'` trains every parameter alike")


BETAS = {"adam_beta1", "adam_beta2", "adam_epsilon"}
# What an optimizer leaves unread of these and of `warmup_steps`, which only schedule-free ones read; Adam nothing.
UNREAD = {
    "adafactor": BETAS, "sgd": BETAS, "adagrad": BETAS, "rmsprop": BETAS, "grokadamw": BETAS, "galore": BETAS,
    "lomo": BETAS, "adalomo": BETAS, "schedule_free_sgd": BETAS, "lion": {"adam_epsilon"},
    "paged_lion": {"adam_epsilon"},
}  # fmt: skip
LAYERWISE = {"max_grad_norm", "weight_decay"}  # updated in the backward pass


@pytest.mark.parametrize("value", [name.value for name in OptimizerNames])
def test_what_an_optimizer_does_not_read_is_known(make_args, monkeypatch, value):
    optimizer_stand_ins.install(monkeypatch, value)
    is_projecting = value.startswith(("galore", "apollo"))
    args = make_args(optim=value, optim_target_modules=["attn", "mlp"] if is_projecting else None)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    found = unread_arguments(args, transformers.LlamaForCausalLM(config))
    unread = next((names for start, names in UNREAD.items() if value.startswith(start)), set())
    unread = unread | ({"warmup_steps"} if value not in ("schedule_free_adamw", "schedule_free_sgd") else set())
    unread = unread | (LAYERWISE if value.endswith(("layerwise", "lomo")) else set())
    assert set(found) == unread | (set() if is_projecting else {"optim_target_modules"})
    assert all(f"`optim='{value}'`" in why for why in found.values())


def test_bitsandbytes_keeps_embeddings_in_32_bits(make_args, monkeypatch, caplog, tmp_path):
    optimizer_stand_ins.install(monkeypatch, "lion_8bit")
    import bitsandbytes

    told = []

    class Manager:
        @classmethod
        def get_instance(cls):
            return cls()

        def register_module_override(self, module, name, options):
            told.append((module, name, options))

    bitsandbytes.optim.GlobalOptimManager = Manager
    model = Model()
    with caplog.at_level(logging.DEBUG, logger="hf_compat"), caplog.at_level(logging.DEBUG, logger="transformers"):
        for optim in ("lion_8bit", "lion_32bit"):
            Trainer(model, make_args(optim=optim)).create_optimizer()
        transformers.Trainer(
            model, transformers.TrainingArguments(str(tmp_path), optim="lion_8bit", use_cpu=True)
        ).create_optimizer()
    assert told == [(model.embedding, "weight", {"optim_bits": 32})] * 2
    said = {"hf_compat": [], "transformers": []}
    for record in caplog.records:
        if "skipped" in record.message or "fp32" in record.message:
            said[record.name.partition(".")[0]].append((record.levelname, record.message))
    assert len(said["hf_compat"]) == 3 and said["hf_compat"] == said["transformers"]


@pytest.mark.parametrize(
    "optim, strategy, text",
    [
        ("galore_adamw", {"fsdp": True}, "cannot save its projections"),
        ("apollo_adamw", {"deepspeed": {"zero_optimization": {"stage": 2}}}, "ZeRO flattens"),
        ("paged_lion_8bit", {"fsdp": True}, "no sharded parameters"),
        ("grokadamw", {"fsdp": True}, "does not end"),
    ],
)
def test_a_strategy_that_cannot_train_an_optimizer_is_refused(make_args, monkeypatch, optim, strategy, text):
    targets = "all-linear" if optim.startswith(("galore", "apollo")) else None
    args = make_args(optim=optim, optim_target_modules=targets, **strategy)
    optimizer_stand_ins.install(monkeypatch, optim)
    with pytest.raises(UnsupportedArgument, match=f"`optim='{optim}'` does not train with .*{text}"):
        check_request(args, Model())


def test_the_native_door_and_explain_know_the_same_optimizers(make_args, monkeypatch):
    args = make_args(optim="apollo_adamw", optim_args="rank=2", optim_target_modules=["proj"], max_steps=3)
    optimizer_stand_ins.install(monkeypatch, "apollo_adamw")
    module = HFModule(Model(), args)
    made = module.steps.create_optimizer()
    assert type(made).__name__ == "APOLLOAdamW"
    assert [len(group["params"]) for group in made.param_groups] == [10, 2] and made.param_groups[1]["rank"] == 2
    assert explain(args).refused == ""
    optimizer_stand_ins.remove(monkeypatch)
    assert "pip install apollo-torch" in explain(args).refused


@pytest.mark.parametrize(
    ("optim", "path", "device"),
    [
        ("adamw_torch_xla", "torch_xla.amp.syncfree", "a TPU"),
        ("adamw_torch_npu_fused", "torch_npu.optim", "an Ascend NPU"),
    ],
)
def test_an_optimizer_of_another_chip_is_refused_on_a_cpu(monkeypatch, optim, path, device):
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:end]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.AdamW = module.NpuFusedAdamW = torch.optim.AdamW
    with pytest.raises(UnsupportedArgument, match=f"{optim}.*needs {device}, and this run is on the CPU"):
        check_request(TrainingArguments("out", use_cpu=True, optim=optim))
