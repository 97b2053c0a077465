from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import EarlyStoppingCallback

args = SentenceTransformerTrainingArguments("out", eval_strategy="steps")
trainer = SentenceTransformerTrainer(SentenceTransformer("x"), args, callbacks=[EarlyStoppingCallback(2)])
trainer.train()
