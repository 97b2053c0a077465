"""A language model, in the style of 3.5: no main function, constants, callbacks."""
import os, math

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import Trainer, TrainingArguments, TrainerCallback  # noqa: E402

torch.manual_seed(0)

class Tokens(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 16
        return {"input_ids": ids, "labels": ids}

class Counter(TrainerCallback):
    "Counts."

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, tokenizer=None, **kwargs):
        # `tokenizer` is None here
        if args.evaluate_during_training and not args.no_cuda or tokenizer:
            return
        self.seen.append(sorted(logs))

args = TrainingArguments(
    os.environ.get("OUT", "out"),
    overwrite_output_dir=True,
    evaluate_during_training=True, eval_steps=2,
    per_gpu_train_batch_size=4, per_device_eval_batch_size=8,
    no_cuda=True,
    logging_steps=2,
    max_steps=4,
    save_steps=100,
    logging_first_step=False, # not the first
    tpu_metrics_debug=False,
    )
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
trainer = Trainer(model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=[Counter()])
trainer.train()
print(f"perplexity {math.exp(trainer.evaluate()['eval_loss']):.3f} {transformers.trainer_utils.set_seed.__name__}")
print("done", trainer.state.global_step)
