from transformers import Trainer, is_torch_tpu_available
from transformers.trainer_utils import PredictionOutput

if is_torch_tpu_available():
    import torch_xla.core.xla_model as xm


class QuestionAnsweringTrainer(Trainer):
    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None):
        loop = self.prediction_loop if self.args.use_legacy_prediction_loop else self.evaluation_loop
        output = loop(self.get_eval_dataloader(eval_dataset), description="Evaluation", ignore_keys=ignore_keys)
        return PredictionOutput(predictions=output.predictions, label_ids=None, metrics=output.metrics)
