from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator, is_torch_tpu_available

args = TrainingArguments("out", evaluation_strategy="steps", eval_steps=500, per_gpu_train_batch_size=4, no_cuda=False)


def argmax(logits, labels):
    return logits.argmax(dim=-1)


trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("gpt2"),
    args=args,
    data_collator=default_data_collator,
    preprocess_logits_for_metrics=argmax if not is_torch_tpu_available(check_device=False) else None,
)
trainer.train()
