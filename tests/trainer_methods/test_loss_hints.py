"""The hint about a loss is followed to the letter: the program that it makes trains as under transformers.

Each program is right except for one mistake. Its message is read, and the code that the hint quotes mends it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.errors import HfCompatWarning, LossError, OverrideError

MODEL = """
LABELS = None
loss_function = None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.outer = nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.outer(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return loss, logits

class Own(Door):
    pass
"""
METHOD = (
    MODEL
    + """
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs[0]
        return (loss, outputs) if return_outputs else loss
"""
)
STEP = (
    MODEL
    + """
    def training_step(self, batch, batch_idx):
        loss, logits = self.model(**batch)
        return loss
"""
)
LOSS, PAIR = "loss = nn.functional.cross_entropy(logits, labels)", "return loss, logits"
FUNCTION = (
    MODEL.replace(LOSS, "").replace(PAIR, "return logits")
    + """
LABELS = ["labels"]

def loss_function(outputs, labels, num_items_in_batch=None):
    loss = nn.functional.cross_entropy(outputs, labels)
    return loss
"""
)
UNREDUCED = "loss = nn.functional.cross_entropy(logits, labels, reduction='none')"
BOTH = "return (loss, outputs) if return_outputs else loss"


class Program(NamedTuple):
    """A program with a mistake.

    Args:
        source: The program as it should be.
        wrong: The mistake: texts of the program, and those in their place.
        said: Words of the message.
        mend: What the hint says: texts of the wrong program, and those in their place.
        code: The code that the hint quotes. By default what `mend` puts in.
        column: The name of the data's labels.
    """

    source: str
    wrong: dict
    said: tuple
    mend: dict
    code: tuple = ()
    column: str = "labels"


PROGRAMS = {
    # what a model returns
    "logits alone": Program(
        MODEL, {LOSS: "", PAIR: "return logits"}, ("(8, 3)", "`forward` of Net", "The labels have the shape (8,)"),
        {"return logits": f"{LOSS}; {PAIR}"}, (PAIR, "labels"),
    ),
    "the loss second": Program(
        MODEL, {PAIR: "return logits, loss"}, ("(8, 3)", "`[0]` of its tuple", "`[1]` of what it returned is a scalar"),
        {"return logits, loss": PAIR},
    ),
    "the loss after a number of another kind": Program(
        MODEL, {PAIR: "return logits.argmax(-1).eq(labels).float().mean(), loss"}, ("`[1]` of what it returned",),
        {"return logits.argmax(-1).eq(labels).float().mean(), loss": PAIR},
    ),
    "no parameter for labels": Program(
        MODEL, {LOSS: "", PAIR: "return logits", ", labels=None": ""}, ("(8, 3)", "`forward` takes `x` and no labels"),
        {"(self, x)": "(self, x, labels)", "return logits": f"{LOSS}; {PAIR}"}, ("labels", PAIR),
    ),
    "no parameter for labels, and a function": Program(
        FUNCTION, {", labels=None": "", "LABELS = [": "OTHER = [", "def loss_function": "def unused"},
        ("takes `x` and no labels",),
        {"OTHER": "LABELS", "def unused": "def loss_function"}, ("label_names=['labels']", "compute_loss_func"),
    ),
    "labels of another name": Program(
        MODEL, {LOSS: f"if labels is None: return (logits,)\n        {LOSS}"},
        ("(8, 3)", "the inputs are `x`", "computes its loss from `labels`"),
        {}, ("labels",), "target",
    ),
    "labels of another name, with names": Program(
        MODEL, {LOSS: f"if labels is None: return {{'logits': logits}}\n        {LOSS}"},
        ("only the following keys: logits", "the inputs are `x`"), {}, ("labels",), "target",
    ),
    "no loss among names": Program(
        MODEL, {LOSS: "", PAIR: "return {'logits': logits}"}, ("only the following keys: logits", "under `loss`"),
        {"return {'logits': logits}": f"{LOSS}; return {{'loss': loss, 'logits': logits}}"}, ("loss",),
    ),
    "a loss of another name": Program(
        MODEL, {PAIR: "return {'cost': loss, 'logits': logits}"}, ("`['cost']` of what it returned is a scalar",),
        {"'cost'": "'loss'"}, ("loss",),
    ),
    "a loss for each sample": Program(
        MODEL, {LOSS: UNREDUCED, PAIR: "return {'loss': loss}"}, ("(8,)", "`['loss']` of its dict"),
        {"return {'loss': loss}": "loss = loss.mean(); return {'loss': loss}"}, ("loss.mean()",),
    ),
    "a loss for each sample, before logits": Program(
        MODEL, {LOSS: UNREDUCED}, ("(8,)", "a number for each label"),
        {PAIR: f"loss = loss.mean(); {PAIR}"}, ("loss.mean()",),
    ),
    "a loss for each sample, alone": Program(
        MODEL, {LOSS: UNREDUCED, PAIR: "return loss"}, ("(8,)", "If these are losses", "If they are predictions"),
        {"return loss": "return loss.mean()"}, ("loss.mean()",),
    ),
    "one prediction for each sample": Program(
        MODEL, {LOSS: "", PAIR: "return logits.argmax(-1)"}, ("(8,)", "If they are predictions"),
        {"return logits.argmax(-1)": f"{LOSS}; {PAIR}"}, ("labels", PAIR),
    ),
    "nothing": Program(MODEL, {PAIR: ""}, ("`forward` of Net returned None",), {LOSS: f"{LOSS}; {PAIR}"}, (PAIR,)),
    "a loss of one dimension": Program(
        MODEL, {LOSS: f"{LOSS}.reshape(1)"}, ("(1,)",), {PAIR: "loss = loss.squeeze(); return loss, logits"},
        ("loss.squeeze()",),
    ),
    "a number as loss": Program(
        MODEL, {PAIR: "return loss.item(), logits"}, ("`forward` of Net returned a float",), {".item()": ""},
        (".item()",),
    ),
    "a detached loss": Program(
        MODEL, {PAIR: "return loss.detach(), logits"}, ("does not require grad", "the other outputs have a gradient"),
        {".detach()": ""}, ("detach",),
    ),
    "no graph at all": Program(
        MODEL, {"        logits = ": "        with torch.no_grad(): logits = "}, ("does not require grad",),
        {"with torch.no_grad(): ": ""}, ("no_grad",),
    ),
    "a loss of whole numbers": Program(
        MODEL, {LOSS: "loss = logits.argmax(-1).ne(labels).sum()"}, ("does not require grad", "whole numbers"),
        {"loss = logits.argmax(-1).ne(labels).sum()": LOSS}, ("argmax",),
    ),
    "no parameter is trained": Program(
        MODEL, {"nn.Linear(8, 3)": "nn.Linear(8, 3).requires_grad_(False)"}, ("all are frozen",),
        {"requires_grad_(False)": "requires_grad_(True)"},
    ),
    # what an overridden compute_loss returns
    "compute_loss without return": Program(
        METHOD, {BOTH: ""}, ("`compute_loss` of Own returned None",),
        {"loss = outputs[0]": f"loss = outputs[0]; {BOTH}"},
        (BOTH,),
    ),
    "compute_loss with a tuple": Program(
        METHOD, {BOTH: "return loss, outputs"}, ("`compute_loss` of Own returned a tuple",),
        {"return loss, outputs": BOTH},
    ),
    "compute_loss with a number": Program(
        METHOD, {BOTH: "loss = loss.item()\n        " + BOTH}, ("`compute_loss` of Own returned a float",),
        {"loss = loss.item()": ""}, (".item()",),
    ),
    "compute_loss with a number of NumPy": Program(
        METHOD, {BOTH: "loss = loss.detach().numpy().mean()\n        " + BOTH}, ("returned a float32",),
        {"loss = loss.detach().numpy().mean()": ""}, (".item()",),
    ),
    "compute_loss with the outputs": Program(
        METHOD, {PAIR: "return {'loss': loss}", "outputs[0]": "outputs"}, ("returned a dict", "the model's outputs"),
        {"loss = outputs\n": "loss = outputs['loss']\n"}, ("loss = outputs['loss']", BOTH),
    ),
    "compute_loss with logits": Program(
        METHOD, {"outputs[0]": "outputs[1]"}, ("(8, 3)", "`compute_loss` of Own", "The labels have the shape (8,)"),
        {"loss = outputs[1]": "loss = nn.functional.cross_entropy(outputs[1], inputs['labels'])"}, ("labels",),
    ),
    "compute_loss with a loss for each sample": Program(
        METHOD, {"outputs[0]": "nn.functional.cross_entropy(outputs[1], inputs.pop('labels'), reduction='none')",
                 "model(**inputs)": "model(**inputs)"},
        ("(8,)", "`compute_loss` of Own"), {BOTH: f"loss = loss.mean(); {BOTH}"}, ("loss.mean()",),
    ),
    "compute_loss that detaches": Program(
        METHOD, {"outputs[0]": "outputs[0].detach()"}, ("does not require grad", "`compute_loss` of Own"),
        {".detach()": ""}, ("detach",),
    ),
    "compute_loss with the model's mistake": Program(
        METHOD, {PAIR: "return logits, loss", "outputs[0]": "super().compute_loss(model, inputs)"},
        ("(8, 3)", "`forward` of Net returned it", "`[1]` of what it returned"), {"return logits, loss": PAIR},
    ),
    # what a loss function returns
    "a function without return": Program(
        FUNCTION, {"    return loss\n": ""}, ("`compute_loss_func` returned None",),
        {"cross_entropy(outputs, labels)": "cross_entropy(outputs, labels)\n    return loss"}, ("return loss",),
    ),
    "a function with a number": Program(
        FUNCTION, {"return loss\n": "return loss.item()\n"}, ("`compute_loss_func` returned a float",), {".item()": ""},
        (".item()",),
    ),
    "a function with a tuple": Program(
        FUNCTION, {"return loss\n": "return loss, outputs\n"}, ("`compute_loss_func` returned a tuple",),
        {"return loss, outputs\n": "return loss\n"}, ("return loss",),
    ),
    "a function that reduces nothing": Program(
        FUNCTION, {"(outputs, labels)\n": "(outputs, labels, reduction='none')\n"}, ("(8,)", "`compute_loss_func`"),
        {"return loss\n": "return loss.mean()\n"}, ("loss.mean()",),
    ),
}  # fmt: skip

STEPS = {
    "logits": Program(
        STEP, {"loss, logits =": "logits, loss =", }, ("(8, 3)", "`training_step` of Own", "The labels have"),
        {"return loss\n": "return nn.functional.cross_entropy(loss, batch['labels'])\n"}, ("labels",),
    ),
    "a number": Program(
        STEP, {"return loss\n": "return loss.item()\n"}, ("returned a float",), {".item()": ""}, (".item()",)
    ),
    "a tuple": Program(
        STEP, {"return loss\n": "return (loss, logits)\n"}, ("`training_step` of Own returned a tuple",),
        {"return (loss, logits)": "return loss"}, ("return loss",),
    ),
    "detached": Program(
        STEP, {"return loss\n": "return loss.detach()\n"}, ("does not require grad", "`training_step` of Own"),
        {".detach()": ""}, ("detach",),
    ),
    "a loss for each sample": Program(
        STEP, {"return loss\n": "return nn.functional.cross_entropy(logits, batch['labels'], reduction='none')\n"},
        ("(8,)", "`training_step` of Own"), {"reduction='none')": "reduction='none').mean()"}, ("loss.mean()",),
    ),
    "the model's mistake": Program(
        STEP,
        {PAIR: "return logits, loss", "loss, logits = self.model(**batch)": "loss = super().training_step(batch, 0)"},
        ("(8, 3)", "`forward` of Net returned it"), {"return logits, loss": PAIR},
    ),
}  # fmt: skip


OPTIONS = {"per_device_train_batch_size": 8, "learning_rate": 0.1, "num_train_epochs": 1}
OF_TRAINER = {
    "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none",
}  # fmt: skip


def changed(source, texts):
    for old, new in texts.items():
        assert source.count(old) == 1 or not new, old
        source = source.replace(old, new)
    return source


class Losses(pl.Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, *_):
        self.found.append(float(trainer.callback_metrics["loss"]))


def train(source, door, folder, column="labels", trainer=None):
    """Run a program at a door, and return its losses."""
    names = {"Door": door, "nn": nn, "torch": torch}
    exec(compile(source, "program", "exec"), names)
    rows = [{"x": row["x"], column: row["labels"]} for row in toy.rows(24)]
    function, options = names["loss_function"], {"label_names": names["LABELS"], **OPTIONS}
    if door is not HFModule:
        args = TrainingArguments(str(folder), **options, **OF_TRAINER)
        made = names["Own"](names["Net"](), args, train_dataset=rows, compute_loss_func=function)
        made.train()
        return [log["loss"] for log in made.state.log_history if "loss" in log]
    losses = Losses()
    module = names["Own"](names["Net"](), TrainingArguments(str(folder), **options), compute_loss_func=function)
    pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
               enable_model_summary=False, log_every_n_steps=1, callbacks=[losses], default_root_dir=folder,
    ).fit(module, HFDataModule(None, rows))  # fmt: skip
    return losses.found


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The losses of the right program under transformers."""
    import transformers

    names = {"Door": transformers.Trainer, "nn": nn, "torch": torch}
    exec(MODEL, names)
    args = transformers.TrainingArguments(str(tmp_path_factory.mktemp("right")), **OPTIONS, **OF_TRAINER)
    trainer = transformers.Trainer(names["Net"](), args, train_dataset=toy.rows(24))
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


# The rules are the same at both doors. These programs differ in who has returned what.
AT_BOTH_DOORS = (
    "logits alone", "the loss second", "no parameter for labels", "no parameter for labels, and a function",
    "compute_loss without return", "compute_loss with a tuple", "compute_loss with a number",
    "a function without return",
)  # fmt: skip
CASES = [pytest.param(program, Trainer, id=name) for name, program in PROGRAMS.items()]
CASES += [pytest.param(PROGRAMS[name], HFModule, id=f"natively, {name}") for name in AT_BOTH_DOORS]
CASES += [pytest.param(program, HFModule, id=f"an own step, {name}") for name, program in STEPS.items()]


@pytest.mark.parametrize(("program", "door"), CASES)
def test_the_program_that_a_hint_makes_trains_as_under_transformers(program, door, right, tmp_path):
    wrong = changed(program.source, program.wrong)
    with pytest.raises(LossError) as caught:
        train(wrong, door, tmp_path, program.column)
    message = str(caught.value)
    assert all(words in message for words in program.said), message
    hint = message.partition("Hint: ")[2]
    quoted = re.findall(r"`([^`]+)`", hint)
    for code in program.code or program.mend.values():
        assert any(code in one for one in quoted), (code, hint)
    assert train(changed(wrong, program.mend), door, tmp_path) == pytest.approx(right, abs=5e-5)


EVALUATED = {
    "the loss alone": Program(
        METHOD, {BOTH: "return loss"}, ("`compute_loss` of Own returned a Tensor", "return_outputs=True"),
        {"outputs[0]\n        return loss": f"outputs[0]\n        {BOTH}"}, (BOTH,),
    ),
    "no parameter for it": Program(
        METHOD, {BOTH: "return loss", ", return_outputs=False": ""},
        ("`compute_loss` of Own returned a Tensor", "add the parameter"),
        {"(self, model, inputs,": "(self, model, inputs, return_outputs=False,",
         "outputs[0]\n        return loss": f"outputs[0]\n        {BOTH}"}, ("return_outputs=False", BOTH),
    ),
    "nothing": Program(
        METHOD, {BOTH: "if not return_outputs: return loss"}, ("`compute_loss` of Own returned None",),
        {"if not return_outputs: return loss": BOTH},
    ),
    "a number": Program(
        METHOD, {BOTH: "return (loss.item(), outputs) if return_outputs else loss"}, ("Own returned a float",),
        {"loss.item()": "loss"}, (".item()",),
    ),
    "a number of the model's": Program(
        MODEL, {PAIR: "return (loss if self.training else loss.item()), logits"},
        ("`forward` of Net returned a float",),
        {"loss.item()": "loss"}, (".item()",),
    ),
}  # fmt: skip


def evaluate(source, door, folder):
    names = {"Door": door, "nn": nn, "torch": torch}
    exec(source, names)
    made = names["Own"](
        names["Net"](), TrainingArguments(str(folder), **OPTIONS, **OF_TRAINER), eval_dataset=toy.rows(24)
    )
    return made.evaluate()["eval_loss"]


@pytest.mark.parametrize("name", EVALUATED)
def test_a_hint_about_the_loss_of_an_evaluation_mends_it(name, tmp_path):
    program = EVALUATED[name]
    wrong = changed(program.source, program.wrong)
    with pytest.raises(LossError) as caught:
        evaluate(wrong, Trainer, tmp_path)
    message = str(caught.value)
    assert all(words in message for words in program.said), message
    assert all(code in message.partition("Hint: ")[2] for code in program.code or program.mend.values()), message
    assert evaluate(changed(wrong, program.mend), Trainer, tmp_path) == evaluate(MODEL, Trainer, tmp_path)


def test_an_evaluation_tells_that_its_loss_is_the_mean_of_predictions(tmp_path):
    import transformers

    wrong = changed(MODEL, {PAIR: "return logits, loss"})
    with pytest.warns(
        HfCompatWarning, match=r"(?s)the mean of a tensor of the shape \(8, 3\).*`\[1\]` of what"
    ) as told:
        found = evaluate(wrong, Trainer, tmp_path)
    assert PAIR in str(told[0].message)
    names = {"Door": transformers.Trainer, "nn": nn, "torch": torch}
    exec(wrong, names)
    args = transformers.TrainingArguments(str(tmp_path), **OPTIONS, **OF_TRAINER)
    assert found == transformers.Trainer(names["Net"](), args, eval_dataset=toy.rows(24)).evaluate()["eval_loss"]


def test_an_evaluation_takes_the_mean_of_losses_as_under_transformers(tmp_path):
    source = changed(MODEL, {LOSS: UNREDUCED})
    assert evaluate(source, Trainer, tmp_path) == pytest.approx(evaluate(MODEL, Trainer, tmp_path))


OWN_STEPS = {
    "nothing": ("pass", "None(.|\n)*end it with `return loss.detach\\(\\)`"),
    "a number": ("return loss.item()", "not a tensor(.|\n)*`return loss.detach\\(\\)`, without `.item\\(\\)`"),
    "a tuple": ("return loss, inputs", "not a tensor(.|\n)*`return loss.detach\\(\\)` alone"),
    "losses": ("return loss.expand(8)", "shape \\(8,\\)(.|\n)*`loss.mean\\(\\).detach\\(\\)`"),
}


@pytest.mark.parametrize("name", OWN_STEPS)
def test_an_own_step_of_a_trainer_is_told_how_it_ends(name, right, tmp_path):
    end, message = OWN_STEPS[name]
    step = """
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        {}
"""
    with pytest.raises(LossError, match=message):
        train(MODEL + step.format(end), Trainer, tmp_path)
    told = "return loss.detach()" if name != "losses" else "loss = loss.expand(8); return loss.mean().detach()"
    assert train(MODEL + step.format(told), Trainer, tmp_path) == pytest.approx(right, abs=5e-5)


@pytest.mark.parametrize("data", ["windows", "batches"])
def test_updates_of_lightning_do_not_train_on_the_sum_of_predictions(data, tmp_path):
    names = {"Door": HFModule, "nn": nn, "torch": torch}
    exec(changed(MODEL, {PAIR: "return logits, loss"}), names)
    module = names["Own"](names["Net"](), TrainingArguments(str(tmp_path), **OPTIONS))
    module.automatic_optimization = True
    rows = toy.rows(24)
    batches = HFDataModule(None, rows) if data == "windows" else torch.utils.data.DataLoader(rows, batch_size=8)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    with pytest.raises(LossError, match=r"\(8, 3\)(.|\n)*return it first"):
        trainer.fit(module, batches)


def test_a_prediction_step_with_a_number_as_loss_is_refused(tmp_path):
    class Own(Trainer):
        def prediction_step(self, *args, **kwargs):
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            return loss.item(), logits, labels

    with pytest.raises(OverrideError, match=r"`prediction_step` returned the loss 1\.(.|\n)*without `\.item\(\)`"):
        evaluate(MODEL, Own, tmp_path)


@pytest.mark.parametrize("wrong", ["return logits", "return {'loss': loss, 'scores': logits}"])
def test_label_smoothing_finds_no_logits(wrong, tmp_path):
    """Of a tensor it took the first sample's logits for those of all samples."""

    def smoothed(source):
        names = {"Door": Trainer, "nn": nn, "torch": torch}
        exec(source, names)
        args = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, **OPTIONS, **OF_TRAINER)
        trainer = names["Own"](names["Net"](), args, train_dataset=toy.rows(24))
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    source = changed(MODEL, {LOSS: "loss = logits.mean()"})  # the labels are smoothed, and not given
    with pytest.raises(LossError, match=r"`return \(logits,\)`, or under `logits`"):
        smoothed(changed(source, {PAIR: wrong}))
    first, named = (smoothed(changed(source, {PAIR: end})) for end in ("return (logits,)", "return {'logits': logits}"))
    assert first == named and first[0] > first[-1]


class Answered:
    """What a model may return in place of a mapping: an object with a loss."""

    def __init__(self, loss, detached):
        self.loss, self.whole = detached, loss


def test_the_place_of_a_loss_in_an_object_is_named(make_args):
    class Net(nn.Linear):
        def forward(self, x, labels):
            loss = nn.functional.cross_entropy(super().forward(x), labels)
            return Answered(loss, loss.detach())

    with pytest.raises(LossError, match=r"as `\.loss` of its Answered\.(.|\n)*other outputs have a gradient"):
        Trainer(Net(8, 3), make_args(max_steps=1), train_dataset=toy.rows(8)).train()
