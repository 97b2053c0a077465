from transformers import AutoModelForMaskedLM, DataCollatorForWholeWordMask, Trainer, TrainingArguments
from transformers.tokenization_utils import BatchEncoding, PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> BatchEncoding:
    return tokenizer(text)


def train(tokenizer):
    args = TrainingArguments(output_dir="out", warmup_ratio=0.06, adafactor=True)
    collator = DataCollatorForWholeWordMask(tokenizer)
    Trainer(AutoModelForMaskedLM.from_pretrained("roberta-base"), args, collator).train()
