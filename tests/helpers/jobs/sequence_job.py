"""A model whose sequences processes share (DeepSpeed's Ulysses), trained by transformers' Trainer or by ours.

sequence_job.py FOLDER ours|theirs [name=value …]

`sp=2` processes share a sequence. `resume=…` names a checkpoint. `stage=…` is ZeRO's. `dropped=…` is a rate of dropout.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from pathlib import Path

import accelerate
import torch
from accelerate.utils import DeepSpeedSequenceParallelConfig

scatter = torch.distributed.scatter


def rows(count: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Samples whose prompts, which the loss leaves out, are longer and longer."""
    found = []
    for i in range(count):
        ids = torch.arange(i, i + length) * (1 + i % 3) % 32
        labels = ids.masked_fill(torch.arange(length) < i % (length - 2), -100)
        found.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)})
    return found


def begin_epoch(self, epoch):
    """Start each epoch anew. Upstream's loader ends at the first read of the second one, and an update is lost."""
    self.dl.set_epoch(epoch)
    self.iter = iter(self.dl)


def scatter_in_group(output, given, source, group=None):
    """Scatter from a rank of the group. In torch 2.13 the backward pass of `all_gather` takes it for one of all."""
    return scatter(output, given, group=group, group_src=source)


def main() -> None:
    torch.set_num_threads(1)
    folder, api, *words = sys.argv[1:]
    options = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in words)}
    torch.distributed.scatter = scatter_in_group
    import deepspeed
    import transformers
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    package = transformers
    if api == "ours":
        import hf_compat as package
    else:  # Accelerate knows no such processes on CPUs, and nothing else stands in their way
        accelerate.ParallelismConfig._validate_accelerator = lambda *_: None
        deepspeed.init_distributed("gloo")
        ulysses_sp.UlyssesSPDataLoaderAdapter.set_epoch = begin_epoch
    resume, sp, stage = options.pop("resume", None), options.pop("sp", 2), options.pop("stage", 1)
    world = int(os.environ["WORLD_SIZE"])
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    shared = accelerate.ParallelismConfig(
        sp_size=sp, sp_backend="deepspeed", sp_handler=handler if sp > 1 else None, dp_replicate_size=world // sp
    )
    transformers.set_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=options.pop("dropped", 0.0),
        attn_implementation="sdpa",
    )  # fmt: skip
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_steps": 6}
    usual |= {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "logging_steps": 1}
    zero = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": stage},
    }  # fmt: skip
    args = package.TrainingArguments(
        f"{folder}/{api}", use_cpu=True, disable_tqdm=True, report_to="none", deepspeed=zero,
        parallelism_config=shared if sp > 1 else None, include_num_input_tokens_seen="all", **usual | options,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    trainer = package.Trainer(model, args, train_dataset=rows(22), eval_dataset=rows(9))
    trainer.train(resume_from_checkpoint=resume)
    if api == "ours":  # another fit shares sequences anew, or not at all
        assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] is attention
    evaluated = trainer.evaluate()
    # under ZeRO 3 transformers finds parameters empty that it counts
    timed = ("_runtime", "_per_second", *(("total_flos",) if stage == 3 else ()))
    logs = [{k: v for k, v in log.items() if not k.endswith(timed)} for log in trainer.state.log_history]
    named = sorted(trainer.model.state_dict().items())
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in named)).hexdigest()
    if args.process_index == 0:
        result = {"logs": logs, "eval_loss": evaluated["eval_loss"], "weights": digest}
        (Path(folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
