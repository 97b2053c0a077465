from transformers import *
from transformers.trainer import *

args = TrainingArguments("out", evaluation_strategy="epoch")
Trainer(model=AutoModel.from_pretrained("x"), args=args).train()
