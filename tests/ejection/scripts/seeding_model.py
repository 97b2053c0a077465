"""Train a model whose constructor seeds torch, with a metric function that counts its calls."""

import sys

from helpers_of_scripts import Accuracy, SeededNet
from tiny import rows
from transformers import Trainer, TrainingArguments, set_seed

set_seed(5)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "seeding",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=SeededNet(),
    args=args,
    train_dataset=rows(22),
    eval_dataset={"near": rows(9, seed=1), "far": rows(6, seed=2)},
    compute_metrics=Accuracy(),
)
trainer.train()
