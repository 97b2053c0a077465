import transformers
from transformers import Trainer, TrainingArguments

try:
    from transformers.trainer import is_torch_tpu_available
except ImportError:
    is_torch_tpu_available = None


class MultitaskTrainer(transformers.Trainer):
    def prediction_loop(self, dataloader, description):
        return super().prediction_loop(dataloader, description)

    def get_train_dataloader(self):
        return super().get_train_dataloader()


MultitaskTrainer(None, TrainingArguments("out", dataloader_num_workers=2)).train()
