from hf_compat import TrainerCallback, TrainingArguments
from trl import DPOTrainer


class Watch(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        assert isinstance(args, TrainingArguments)


DPOTrainer("gpt2", args=TrainingArguments("out"), callbacks=[Watch()]).train()
