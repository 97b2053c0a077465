"""FSDP 2: each process holds a part of every weight, gradient and optimizer state.

    hf-compat run --devices 2 fsdp2.py --output_dir FOLDER

Shows: `fsdp` and `fsdp_config` as under `transformers`, here on two CPU processes; how much of the model a process
holds; sharded checkpoints, and whole weights at the end, which `from_pretrained` reads.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_compat import Trainer, TrainingArguments, set_seed

BLOCK = 64


class Shares(TrainerCallback):
    """Say what this process holds once the model is sharded."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        every = sum(weight.numel() for weight in model.parameters())
        held = sum(weight.to_local().numel() for weight in model.parameters())
        print(f"process {args.process_index} holds {held:,} of {every:,} parameters", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/fsdp2")
    output_dir = parser.parse_args().output_dir
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=60,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=20,
        save_steps=30,
        save_total_limit=1,
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "SHARDED_STATE_DICT"},
        use_cpu=True,
    )
    set_seed(args.seed)
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    blocks = [list(text[start : start + BLOCK]) for start in range(0, len(text) - BLOCK, BLOCK)]
    config = GPT2Config(
        vocab_size=256, n_positions=BLOCK, n_layer=2, n_head=4, n_embd=64, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks[:2000]],
        eval_dataset=[{"input_ids": block, "labels": block} for block in blocks[2000:2100]],
        callbacks=[Shares()],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("checkpoint:", sorted(path.name for path in Path(output_dir).glob("checkpoint-60/*_0/*.distcp")))
        whole = GPT2LMHeadModel.from_pretrained(output_dir)
        print(f"whole model again: {whole.num_parameters():,} parameters; loss on held-out text: {loss:.3f}")


if __name__ == "__main__":
    main()
