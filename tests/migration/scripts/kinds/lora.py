import transformers


def train(val_set_size: int = 2000, group_by_length: bool = False, ddp: bool = False, use_wandb: bool = False):
    trainer = transformers.Trainer(
        model=None,
        args=transformers.TrainingArguments(
            per_device_train_batch_size=4,
            evaluation_strategy="steps" if val_set_size > 0 else "no",
            save_safetensors=False,
            output_dir="out",
            ddp_find_unused_parameters=False if ddp else None,
            group_by_length=group_by_length,
            report_to=None,
        ),
        data_collator=transformers.DataCollatorForSeq2Seq(None, pad_to_multiple_of=8),
    )
    print(trainer.args.save_safetensors)
    trainer.train()
