"""Masked image modelling, as people's scripts do it: a mask of patches is drawn for every sample."""

import sys

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedImageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

folder = sys.argv[1]
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
set_seed(args.seed)
model = AutoModelForMaskedImageModeling.from_config(AutoConfig.from_pretrained(folder))


class MaskedImages(torch.utils.data.Dataset):
    def __init__(self, count):
        self.images = np.random.default_rng(count).random((count, 3, 8, 8), dtype=np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        mask = np.zeros(16, dtype=int)
        mask[np.random.permutation(16)[:9]] = 1
        return {"pixel_values": torch.from_numpy(self.images[index]), "mask": torch.from_numpy(mask)}


def collate(samples):
    images, masks = (torch.stack([sample[name] for sample in samples]) for name in ("pixel_values", "mask"))
    return {"pixel_values": images, "bool_masked_pos": masks.bool()}


trainer = Trainer(
    model=model, args=args, train_dataset=MaskedImages(20), eval_dataset=MaskedImages(7), data_collator=collate
)
result = trainer.train()
trainer.save_model()
trainer.save_metrics("train", result.metrics)
trainer.save_state()
trainer.save_metrics("eval", trainer.evaluate())
