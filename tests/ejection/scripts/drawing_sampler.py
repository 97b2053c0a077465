"""Draw the order of samples in a sampler of the script's own, as LLaMA-Factory and others do."""

import sys

import torch
from tiny import Net, rows
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer import logger


class ShuffledBlocks(Sampler):
    """Shuffle whole blocks of samples.

    Args:
        size: Samples.
        block: Samples of a block.
    """

    def __init__(self, size, block):
        self.size, self.block = size, block
        self.first = int(torch.randint(size, ()))

    def __len__(self):
        return self.size

    def __iter__(self):
        for block in torch.randperm(self.size // self.block).tolist():
            for place in range(self.block):
                yield (self.first + block * self.block + place) % self.size


class BlockTrainer(Trainer):
    def _get_train_sampler(self, *args):
        logger.info("blocks of four")
        return ShuffledBlocks(len(self.train_dataset), block=4)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        logger.debug("a loss")
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


set_seed(6)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "blocks",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
BlockTrainer(model=Net(), args=args, train_dataset=rows(24)).train()
