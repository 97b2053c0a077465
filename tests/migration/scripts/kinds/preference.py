from transformers import TrainerCallback, TrainingArguments
from trl import SFTTrainer


class Watch(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        assert isinstance(args, TrainingArguments)


trainer = SFTTrainer("gpt2", args=TrainingArguments("out", evaluation_strategy="no"), callbacks=[Watch()])
trainer.train()
