"""The module beside `one_name.py`: a Trainer and a loss of the same names as there."""

from torch import nn
from transformers import Trainer

SCALE = 2.0


def loss_of(outputs, labels):
    return SCALE * nn.functional.mse_loss(outputs["logits"].squeeze(-1), labels)


class RegressionTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = loss_of(outputs, labels)
        return (loss, outputs) if return_outputs else loss
