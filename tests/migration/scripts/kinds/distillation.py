from transformers import Trainer, TrainingArguments


class DistillationArguments(TrainingArguments):
    def __init__(self, *args, alpha=0.5, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.temperature = temperature


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher=None, **kwargs):
        self.words = kwargs.pop("tokenizer")
        super().__init__(*args, **kwargs)
        self.teacher = teacher

    def log(self, logs):
        super().log({**logs, "alpha": self.args.alpha})


trainer = DistillationTrainer(None, DistillationArguments("out", logging_dir="logs"), tokenizer="words")
