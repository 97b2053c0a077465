"""Unlearn one data set and keep another: each sample draws its partner, the loss knows the model from before."""

import copy
import sys

import torch
from texts import decoder, sentences
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Pairs(Dataset):
    def __init__(self, unwanted, wanted):
        super().__init__()
        self.unwanted, self.wanted = unwanted, wanted

    def __len__(self):
        return len(self.unwanted)

    def __getitem__(self, place):
        partner = int(torch.randint(0, len(self.wanted), (1,)))
        return self.unwanted[place]["input_ids"], self.wanted[partner]["input_ids"]


def collate_pairs(samples):
    batches = []
    for rows in zip(*samples, strict=True):
        ids = torch.tensor(rows)
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < 2, -100)
        batches.append((ids, labels, torch.ones_like(ids)))
    return batches


def distribution(outputs):
    return log_softmax(outputs.logits, dim=-1).flatten(0, 1)


class ForgetTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        self.kind = kwargs.pop("kind")
        self.before = kwargs.pop("before")
        super(ForgetTrainer, self).__init__(*args, **kwargs)  # noqa: UP008 - as scripts have it

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        (ids, labels, mask), (kept_ids, kept_labels, kept_mask) = inputs
        outputs = model(ids, labels=labels, attention_mask=mask)
        loss = -outputs.loss
        if self.kind == "kl":
            with torch.no_grad():
                then = distribution(self.before(kept_ids, labels=kept_labels, attention_mask=kept_mask))
            now = distribution(model(kept_ids, labels=kept_labels, attention_mask=kept_mask))
            loss = loss + kl_div(now, then, reduction="batchmean", log_target=True)
        return (loss, outputs) if return_outputs else loss


set_seed(23)
model = decoder()
before = copy.deepcopy(model).eval()
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "forget",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    warmup_steps=2,
    max_steps=7,
    learning_rate=5e-3,
    weight_decay=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    remove_unused_columns=False,
)
trainer = ForgetTrainer(
    model=model,
    args=args,
    train_dataset=Pairs(sentences(20, length=8), sentences(32, seed=4, length=8)),
    data_collator=collate_pairs,
    kind="kl",
    before=before,
)
model.config.use_cache = False
trainer.train()
