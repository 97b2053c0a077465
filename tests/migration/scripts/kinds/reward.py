from torch import nn
from transformers import Trainer, TrainingArguments


class RewardTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        chosen = model(inputs["chosen"])[0]
        rejected = model(inputs["rejected"])[0]
        loss = -nn.functional.logsigmoid(chosen - rejected).mean()
        if return_outputs:
            return loss, {"chosen": chosen, "rejected": rejected}
        return loss


class MarginTrainer(Trainer):
    def compute_loss(self, model, inputs):
        return model(**inputs)[0]


RewardTrainer(model=None, args=TrainingArguments("out", lr_scheduler_type="linear", fp16_full_eval=False)).train()
