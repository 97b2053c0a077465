"""Image classification, as people's scripts do it: random crops and flips in the data set, a collator of tensors."""

import sys

import numpy as np
import torch
from transformers import AutoModelForImageClassification, HfArgumentParser, Trainer, TrainingArguments, set_seed

folder = sys.argv[1]
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
set_seed(args.seed)
model = AutoModelForImageClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)


class Images(torch.utils.data.Dataset):
    def __init__(self, count, augments):
        generator = np.random.default_rng(count)
        self.images = generator.random((count, 3, 10, 10), dtype=np.float32)
        self.labels, self.augments = generator.integers(0, 3, count), augments

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        top, left = torch.randint(3, (2,)).tolist() if self.augments else (1, 1)
        image = torch.from_numpy(self.images[index])[:, top : top + 8, left : left + 8]
        flips = self.augments and torch.rand(()) < 0.5
        return {"image": image.flip(-1) if flips else image, "label": int(self.labels[index])}


def collate(samples):
    images, labels = ([sample[name] for sample in samples] for name in ("image", "label"))
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


trainer = Trainer(
    model=model,
    args=args,
    data_collator=collate,
    train_dataset=Images(22, augments=True),
    eval_dataset=Images(9, augments=False),
    compute_metrics=accuracy,
)
result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
trainer.save_metrics("train", result.metrics)
trainer.save_state()
trainer.save_metrics("eval", trainer.evaluate())
