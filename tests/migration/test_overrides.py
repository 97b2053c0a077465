"""Methods with an earlier release's signature, keywords of trainers and of callbacks' events."""

# ruff: noqa: E501 - sources within tests
from __future__ import annotations

import inspect
import textwrap

import pytest

from helpers.migrated import left, today
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Effect, Target

HEAD = "from transformers import Trainer, TrainerCallback\n\n\n"
WIDE = f"# {'lines may be as long as this one ' * 4}"[:120] + "\n"


def method(source, head="class T(Trainer):"):
    """Return a class after migration, without its first line."""
    body = "\n".join(f"    {line}".rstrip() for line in textwrap.dedent(source).strip().splitlines())
    return textwrap.dedent(today(f"{WIDE}{HEAD}{head}\n{body}\n").partition(f"{head}\n")[2]).strip()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "def log(self, logs):\n    super().log(logs)",
            "def log(self, logs, start_time=None):\n    super().log(logs, start_time)",
        ),
        ("def log(self, logs, *args, **kw): pass", "def log(self, logs, *args, **kw): pass"),
        (
            "def _get_train_sampler(self):\n    return super()._get_train_sampler()",
            "def _get_train_sampler(self, train_dataset=None):\n    return super()._get_train_sampler(train_dataset)",
        ),
        (
            "def _save_checkpoint(self, model, trial, metrics=None):\n    super()._save_checkpoint(model, trial, metrics)",
            "def _save_checkpoint(self, model, trial):\n    super()._save_checkpoint(model, trial)",
        ),
        (
            "def evaluate(self, eval_dataset=None):\n    return super().evaluate(eval_dataset)",
            'def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):\n'
            "    return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)",
        ),
        (
            "@staticmethod\ndef get_optimizer_cls_and_kwargs(args): pass",
            "@staticmethod\ndef get_optimizer_cls_and_kwargs(args, model=None): pass",
        ),
        (
            "def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval): ...",
            "def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, "
            "start_time, learning_rate=None): ...",
        ),
    ],
)
def test_signatures(old, new):
    assert method(old) == new


def test_a_mean_loss_goes_on_being_divided_by_the_micro_batches():
    assert method(
        '''
        """Weighted."""

        # two
        def compute_loss(self, model, inputs, return_outputs=False):
            return super().compute_loss(model, inputs, return_outputs)
        '''
    ) == inspect.cleandoc(
        '''
        """Weighted."""

        # The loss of this class is that of one micro-batch: the Trainer divides it by their number.
        loss_is_scaled_for_ga = False

        # two
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs)
        '''
    )


@pytest.mark.parametrize(
    "source",
    [
        "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): pass",
        "def compute_loss(self, model, inputs, return_outputs=False, **kwargs): pass",
        "def compute_loss(self, *args, **kwargs): pass",
        "def training_step(self, model, inputs, num_items_in_batch=None): pass",
    ],
)
def test_todays_overrides_stay(source):
    assert method(source) == source


def test_a_training_step_of_ones_own_is_not_said_to_be_divided():
    own = method("def training_step(self, model, inputs):\n    return self.compute_loss(model, inputs)")
    assert own.startswith("def training_step(self, model, inputs, num_items_in_batch=None):")
    handed = method("def training_step(self, model, inputs):\n    return super().training_step(model, inputs)")
    assert "loss_is_scaled_for_ga = False" in handed and "super().training_step(model, inputs)\n" in handed + "\n"


def test_a_loss_without_outputs():
    source = (
        "def compute_loss(self, model, inputs):\n    outputs = model(**inputs)\n    loss = outputs[0]\n    return loss"
    )
    assert method(source).endswith("    return (loss, outputs) if return_outputs else loss")
    unclear = (
        f"{HEAD}class T(Trainer):\n    def compute_loss(self, model, inputs):\n        return model(**inputs)[0]\n"
    )
    assert "return_outputs" not in today(unclear) and left(unclear) == [(5, "T.compute_loss")]
    for_5 = today(unclear, Target.TRANSFORMERS_5)  # which calls it with the items: a TypeError at the first step
    assert "return_outputs=False, num_items_in_batch=None" in for_5
    assert left(unclear, Target.TRANSFORMERS_5) == [(5, "T.compute_loss")]


@pytest.mark.parametrize(
    "source",
    [
        "def log(self, logs, prefix): pass",
        "def prediction_loop(self, loader, description): pass",
        "def log(self, logs):\n    start_time = 1",
        "def _save_checkpoint(self, model, trial, metrics=None):\n    print(metrics)\n    super()._save_checkpoint(model, trial, metrics)",
    ],
)
def test_what_a_person_decides_about(source):
    body = source.replace("\n", "\n    ")
    assert left(f"{HEAD}class T(Trainer):\n    {body}\n") != []


def test_keywords_of_trainers():
    source = f"""{HEAD}class T(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, tokenizer=kwargs.pop("tokenizer"), **kwargs)
        print(self.tokenizer)

class U(Trainer):
    def __init__(self, tokenizer, **kwargs):
        super().__init__(
            processing_class=tokenizer, **kwargs)

class V(T): pass

t, u, v = T(tokenizer=1), U(tokenizer=2), V(tokenizer=3)
t.train(model_path="x")
if t.is_world_master(): print(t.tokenizer)
"""
    result = today(source)
    assert 'super().__init__(*args, processing_class=kwargs.pop("tokenizer"), **kwargs)' in result
    assert "T(tokenizer=1), U(tokenizer=2), V(tokenizer=3)" in result, "they take it out of their keywords themselves"
    assert 't.train(resume_from_checkpoint="x")' in result
    assert (
        "if t.is_world_process_zero(): print(t.processing_class)" in result and "print(self.processing_class)" in result
    )


def test_a_trainer_that_keeps_its_own_tokenizer():
    source = (
        f"{HEAD}class T(Trainer):\n    def f(self, t):\n        self.tokenizer = t\n        return self.tokenizer\n"
    )
    assert "return self.tokenizer" in today(source)


def test_events_of_callbacks():
    source = f"""{HEAD}class C(TrainerCallback):
    def on_log(self, args, state, control, tokenizer=None, **kwargs):
        return [tokenizer for _ in kwargs["tokenizer"]] + [args.no_cuda]

    def on_save(self, args, state, control, **kw):
        kw.get("tokenizer", None), kw["model"]

    def on_step_end(self, args, state, control, **rest):
        if "tokenizer" in rest: print(rest["tokenizer"])

    def helper(self, tokenizer):
        return tokenizer
"""
    result = today(source)
    assert "control, processing_class=None, **kwargs):" in result
    assert 'return [processing_class for _ in kwargs["processing_class"]] + [args.use_cpu]' in result
    assert 'kw.get("processing_class", None), kw["model"]' in result and "def helper(self, tokenizer)" in result
    assert 'if "processing_class" in rest: print(rest["processing_class"])' in result


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize(
    "call",
    [
        "super().__init__(model, args, None, train, None, None, None, compute_metrics, callbacks)",
        "super(T, self).__init__(model, args, None, train, None, None, None, self.compute_metrics)",
        "Trainer.__init__(self, model, args, None, train, None, None, None, compute_metrics, **kwargs)",
    ],
)
def test_places_that_moved_in_4_46_fail(call, target):
    source = f"{HEAD}class T(Trainer):\n    def __init__(self, model, compute_metrics, **kwargs):\n        {call}\n"
    (found,) = rewrite_python(source, target).findings
    assert found.effect is Effect.FAILS and found.reason.startswith("since 4.46 compute_metrics stands one place later")


def test_places_of_a_constructor_of_the_script_are_its_own():
    source = f"""{HEAD}class T(Trainer):
    def __init__(self, model, args, a, b, c, d, e, compute_metrics):
        super().__init__(model, args, compute_metrics=compute_metrics)

class U(T):
    def __init__(self, *args):
        super().__init__(1, 2, 3, 4, 5, 6, 7, compute_metrics)

Trainer(1, 2, 3, 4, 5, 6, 7, compute_loss_func, compute_metrics)
"""
    assert [one.effect for one in rewrite_python(source, Target.HF_COMPAT).findings] == [Effect.LOOK, Effect.LOOK]


def test_the_keywords_of_an_event_in_a_method_that_it_calls():
    source = f"""{HEAD}class Saves(TrainerCallback):
    def write(self, folder, kwargs):
        kwargs["tokenizer"].save_pretrained(folder)

    def on_save(self, args, state, control, **kwargs):
        self.write(args.output_dir, kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        self.write(folder="last", kwargs=kwargs)
"""
    five = Target.TRANSFORMERS_5
    assert today(source, five) == source.replace('"tokenizer"', '"processing_class"')
    (found,) = rewrite_python(source, five).mended
    assert found.effect is Effect.FAILS and "transformers 5 gives processing_class" in found.reason


def test_columns_that_are_removed_in_place():
    head = f"{HEAD}class T(Trainer):\n    def _remove_unused_columns(self, dataset, description=None):\n        "
    for target, effect in ((Target.HF_COMPAT, Effect.LOOK), (Target.TRANSFORMERS_5, Effect.FAILS)):
        (found,) = rewrite_python(f"{head}pass\n", target).findings
        assert found.effect is effect and "return the data set" in found.reason
        assert rewrite_python(f"{head}return dataset\n", target).findings == ()
