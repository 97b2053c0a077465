from torch import nn
from transformers import Trainer
from transformers.trainer import ALL_LAYERNORM_LAYERS, get_parameter_names, has_length, is_sagemaker_mp_enabled


class VisionLanguageTrainer(Trainer):
    def _get_train_sampler(self):
        if self.train_dataset is None or not has_length(self.train_dataset):
            return None
        return super()._get_train_sampler()

    def create_optimizer(self):
        if is_sagemaker_mp_enabled():
            return super().create_optimizer()
        decay = get_parameter_names(self.model, ALL_LAYERNORM_LAYERS)
        self.projector: nn.Module = decay
        return self.optimizer

    def _save_checkpoint(self, model, trial, metrics=None):
        super()._save_checkpoint(model, trial, metrics)
