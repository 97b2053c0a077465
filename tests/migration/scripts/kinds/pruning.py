from transformers import AdamW, Trainer, TrainingArguments, get_linear_schedule_with_warmup
from transformers.modeling_utils import find_pruneable_heads_and_indices, prune_linear_layer

optimizer = AdamW([], lr=1e-3, correct_bias=False)
schedule = get_linear_schedule_with_warmup(optimizer, 0, 10)
Trainer(None, TrainingArguments("out", do_train=True), optimizers=(optimizer, schedule)).train()
print(find_pruneable_heads_and_indices, prune_linear_layer)
