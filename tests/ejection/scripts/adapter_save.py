"""Tune an adapter: `save_model` takes HF's private argument, and writes the trained weights alone."""

import os
import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model
from texts import decoder, sentences
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer import TRAINING_ARGS_NAME


class AdapterTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss

    def save_model(self, output_dir=None, _internal_call=False):
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
        trained = {name: weight.cpu() for name, weight in self.model.named_parameters() if weight.requires_grad}
        torch.save(trained, os.path.join(folder, "trained.bin"))
        if self.args.should_save and not _internal_call:
            print(f"{len(trained)} weights in {folder}", file=sys.stderr)


def collate(rows):
    ids = [torch.tensor(row["input_ids"]) for row in sorted(rows, key=lambda row: -len(row["input_ids"]))]
    labels = [torch.cat([torch.full((2,), -100), row[2:]]) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def main():
    set_seed(3)
    model = decoder()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=32, lora_dropout=0.1))
    args = TrainingArguments(
        sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "adapter",
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        remove_unused_columns=False,
        report_to="none",
    )
    rows = [{"input_ids": row["input_ids"][: 5 + place % 5]} for place, row in enumerate(sentences(30))]
    AdapterTrainer(model=model, train_dataset=rows, args=args, data_collator=collate).train()
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
