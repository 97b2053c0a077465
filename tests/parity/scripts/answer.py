"""Question answering by generation: a Seq2SeqTrainer of one's own, whose evaluation makes answers of the tokens."""

import json
import os
import sys

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser, set_seed
from transformers.trainer_seq2seq import Seq2SeqTrainer
from transformers.trainer_utils import EvalPrediction, PredictionOutput, speed_metrics
from transformers.training_args_seq2seq import Seq2SeqTrainingArguments


class AnsweringTrainer(Seq2SeqTrainer):
    """Computes metrics of answers, which a function makes of all tokens."""

    def __init__(self, *args, examples=None, answers_of=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.examples, self.answers_of = examples, answers_of

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        self._gen_kwargs = {"max_length": self.args.generation_max_length, "num_beams": 2, **gen_kwargs}
        output = self._tokens(self.get_eval_dataloader(eval_dataset), "Evaluation", ignore_keys, metric_key_prefix)
        metrics = self._scored(output, metric_key_prefix)
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        self._gen_kwargs = dict(gen_kwargs)
        output = self._tokens(self.get_test_dataloader(test_dataset), "Prediction", ignore_keys, metric_key_prefix)
        answers = self.answers_of(self.examples, output.predictions)
        return PredictionOutput(answers, output.label_ids, self._scored(output, metric_key_prefix))

    def _tokens(self, loader, description, ignore_keys, prefix):
        functions, self.compute_metrics = self.compute_metrics, None  # tokens are no answers yet
        try:
            return self.evaluation_loop(
                loader, description, prediction_loss_only=False, ignore_keys=ignore_keys, metric_key_prefix=prefix
            )
        finally:
            self.compute_metrics = functions

    def _scored(self, output, prefix):
        answers = self.answers_of(self.examples, output.predictions)
        metrics = self.compute_metrics(EvalPrediction(answers, [one["answer"] for one in self.examples]))
        metrics = {f"{prefix}_{name}": value for name, value in metrics.items()} | output.metrics
        metrics.update(speed_metrics(prefix, 0.0, num_samples=output.num_samples))
        return metrics


folder = sys.argv[1]
(args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
with open(os.path.join(folder, "questions.json")) as file:
    questions = json.load(file)


class Questions(torch.utils.data.Dataset):
    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        one = self.examples[index]
        sample = tokenizer(one["question"], one["context"], max_length=20, truncation="only_second")
        return {**sample, "labels": tokenizer(text_target=one["answer"])["input_ids"]}


def answers_of(examples, tokens):
    tokens = tokens[0] if isinstance(tokens, tuple) else tokens
    texts = tokenizer.batch_decode(np.where(tokens < 0, tokenizer.pad_token_id, tokens), skip_special_tokens=True)
    return [{"id": one["id"], "text": text} for one, text in zip(examples, texts, strict=True)]


def first_words(prediction):
    pairs = zip(prediction.predictions, prediction.label_ids, strict=True)
    return {"first": float(np.mean([a["text"].split()[:1] == b.split()[:1] for a, b in pairs]))}


held_out = questions[:6]
trainer = AnsweringTrainer(
    model,
    args,
    DataCollatorForSeq2Seq(tokenizer, model=model),
    Questions(questions[6:]),
    Questions(held_out),
    processing_class=tokenizer,
    compute_metrics=first_words,
    examples=held_out,
    answers_of=answers_of,
)
trainer.train()
trainer.save_model()
trainer.save_state()
found = trainer.predict(Questions(held_out), num_beams=3, max_new_tokens=5)
trainer.save_metrics("predict", found.metrics)
with open(os.path.join(args.output_dir, "generated_predictions.txt"), "w") as file:
    json.dump(found.predictions, file)
