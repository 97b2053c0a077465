from transformers import Trainer, TrainingArguments, deepspeed
from transformers.integrations import is_deepspeed_zero3_enabled

training_args = TrainingArguments("out", deepspeed="ds.json", sharded_ddp="simple")
trainer = Trainer(model=None, args=training_args)
trainer.train()
if deepspeed.is_deepspeed_zero3_enabled() or is_deepspeed_zero3_enabled():
    trainer.save_model()
elif trainer.args.local_rank in (0,):
    trainer.save_model("out/final")
