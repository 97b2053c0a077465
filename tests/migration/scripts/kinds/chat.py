import transformers
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

IGNORE_TOKEN_ID = LabelSmoother.ignore_index
local_rank = None


def rank0_print(*args):
    if local_rank == 0:
        print(*args)


def train():
    global local_rank
    training_args = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses()[0]
    local_rank = training_args.local_rank
    trainer = Trainer(model=None, args=training_args)
    trainer.train()
    if training_args.local_rank == 0:
        trainer.save_model()
