from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.file_utils import is_offline_mode

if is_offline_mode():
    raise LookupError("offline")
args = Seq2SeqTrainingArguments("out", predict_with_generate=True, evaluation_strategy="epoch", push_to_hub_token="x")
tokenizer = AutoTokenizer.from_pretrained("t5-small")
model = AutoModelForSeq2SeqLM.from_pretrained("t5-small")
trainer = Seq2SeqTrainer(model, args, DataCollatorForSeq2Seq(tokenizer, model=model), tokenizer=tokenizer)
trainer.train()
