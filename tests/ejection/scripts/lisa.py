"""Train one decoder layer at a time, drawn by numpy: the callback's class is defined within a function."""

import sys

import numpy as np
import torch
from texts import decoder, sentences
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import TrainerCallback


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def layer_switch(net, how_many, every):
    class Switch(TrainerCallback):
        where = {"LlamaForCausalLM": "self.net.model.layers", "GPT2LMHeadModel": "self.net.transformer.h"}

        def __init__(self, net):
            super().__init__()
            self.net = net
            self.path = self.where[type(net).__name__]
            self.awake = []

        def layers(self):
            return eval(self.path)

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step % every:
                return
            self.awake = np.random.choice(len(self.layers()), how_many, replace=False)
            for place, layer in enumerate(self.layers()):
                for weight in layer.parameters():
                    weight.requires_grad = place in self.awake

    return Switch(net)


def main():
    args = TrainingArguments(
        sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "lisa",
        max_steps=7,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        seed=7,
    )
    set_seed(args.seed)
    model = decoder(layers=3)
    trainer = Trainer(model=model, args=args, train_dataset=sentences(24), data_collator=collate)
    trainer.add_callback(layer_switch(model, how_many=1, every=2))
    trainer.train()


if __name__ == "__main__":
    main()
