from transformers import Trainer, TrainingArguments, Wav2Vec2ForCTC
from transformers.trainer import is_apex_available

if is_apex_available():
    from apex import amp


class CTCTrainer(Trainer):
    def training_step(self, model, inputs):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        if self.args.n_gpu > 1:
            loss = loss.mean()
        if self.use_apex:
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        return loss.detach()


trainer = CTCTrainer(Wav2Vec2ForCTC.from_pretrained("x"), TrainingArguments("out", group_by_length=True), tokenizer=None)
