"""`skip_memory_metrics=False` gives transformers' keys in the same places."""

import threading

import pytest
import transformers

import hf_compat
from helpers import toy
from hf_compat import Trainer
from hf_compat.errors import InertArgumentWarning
from hf_compat.trainer_methods import memory

# What our own logs have besides.

OWN = ("nonfinite_steps",)
OFTEN = {"eval_strategy": "steps", "eval_steps": 1}


def with_own_stages(api):
    """Make a subclass that measures like scripts that replace `evaluate`."""

    class Measures(api.Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            self._memory_tracker.start()
            loader = self.get_eval_dataloader(eval_dataset)
            output = self.evaluation_loop(loader, "Evaluation", metric_key_prefix=metric_key_prefix)
            self.log(output.metrics)
            self._memory_tracker.stop_and_update_metrics(output.metrics)
            return output.metrics

    return Measures


def measuring() -> list[threading.Thread]:
    """Return the threads that watch for a peak. A stopped one may take a moment to end."""
    found = [thread for thread in threading.enumerate() if "peak_monitor_func" in thread.name]
    for thread in found:
        thread.join(5)
    return [thread for thread in found if thread.is_alive()]


def keys(metrics) -> list[str]:
    return [name for name in metrics if name not in OWN]


def stages_of(api, folder, order, trainer_class=None, **values):
    """Call the named methods. Return the keys of their results and of all logs, in order."""
    api.set_seed(0)
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2, "logging_steps": 1}
    args = api.TrainingArguments(str(folder), skip_memory_metrics=False, save_strategy="no", **options, **values)
    held = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(5)}
    if order[-1] == "dict":
        held["eval_dataset"] = {"a": toy.rows(9), "b": toy.rows(8)}
    trainer = (trainer_class or api.Trainer)(toy.Classifier(), args, **held)
    run = {
        "train": lambda: trainer.train().metrics,
        "evaluate": lambda: trainer.evaluate(),
        "dev": lambda: trainer.evaluate(metric_key_prefix="dev"),
        "predict": lambda: trainer.predict(toy.rows(7)).metrics,
        "dict": lambda: trainer.evaluate(),
    }
    return [keys(run[name]()) for name in order], [keys(log) for log in trainer.state.log_history], trainer


# Upstream's measuring takes a whole core for each stage, and most of the time of these.
ORDERS = {
    "training and evaluations within it, twice": (["train", "train", "evaluate", "predict"], OFTEN),
    "prediction first": (["predict", "dev", "train"], {}),
    "several sets": (["train", "dict"], OFTEN),
}
IN_THE_MATRIX = {"prediction first", "several sets"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in IN_THE_MATRIX else name for name in ORDERS]
)
def test_the_keys_and_their_places_are_transformers(tmp_path, name):
    order, values = ORDERS[name]
    theirs, their_logs, _ = stages_of(transformers, tmp_path / "theirs", order, **values)
    ours, our_logs, trainer = stages_of(hf_compat, tmp_path / "ours", order, **values)
    assert any("_mem_cpu_peaked_delta" in key for key in theirs[0])
    assert [sorted(keys) for keys in ours] == [sorted(keys) for keys in theirs]
    assert [sorted(keys) for keys in our_logs] == [sorted(keys) for keys in their_logs]
    assert not measuring()
    assert trainer._memory_tracker.cur_stage is None


def test_a_subclass_that_measures_by_itself(tmp_path):
    found = [
        stages_of(api, tmp_path / api.__name__, ["evaluate", "train"], with_own_stages(api))[0]
        for api in (transformers, hf_compat)
    ]
    assert [sorted(keys) for keys in found[0]] == [sorted(keys) for keys in found[1]]
    assert "eval_mem_cpu_alloc_delta" in found[1][0]


def test_the_numbers_are_those_of_the_process(make_args, tmp_path):
    kept = []

    class Holds(Trainer):
        def training_step(self, *args, **kwargs):
            passing = bytearray(64 << 20)  # given back when the step is over
            passing[:: 1 << 12] = b"x" * len(passing[:: 1 << 12])
            if not kept:
                kept.append(bytearray(b"x" * (96 << 20)))
            return super().training_step(*args, **kwargs)

    args = make_args(output_dir=str(tmp_path), skip_memory_metrics=False, max_steps=2)
    metrics = Holds(toy.Classifier(), args, train_dataset=toy.rows()).train().metrics
    assert 64 << 20 < metrics["train_mem_cpu_alloc_delta"] < 600 << 20
    assert metrics["before_init_mem_cpu"] > 100 << 20


def test_a_failed_training_does_not_keep_later_stages_from_being_measured(make_args, tmp_path):
    class Fails(Trainer):
        def training_step(self, *args, **kwargs):
            raise KeyboardInterrupt

    args = make_args(output_dir=str(tmp_path), skip_memory_metrics=False)
    trainer = Fails(toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not measuring()
    assert "eval_mem_cpu_alloc_delta" in trainer.evaluate()


def test_nothing_is_measured_unless_it_is_asked_for(make_args, tmp_path):
    trainer = Trainer(toy.Classifier(), make_args(output_dir=str(tmp_path), max_steps=1), train_dataset=toy.rows())
    assert trainer._memory_tracker.skip_memory_metrics
    assert not [key for key in trainer.train().metrics if "_mem_" in key]


def test_a_warning_names_what_measuring_needs(make_args, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "is_installed", lambda module: False)
    args = make_args(output_dir=str(tmp_path), skip_memory_metrics=False, max_steps=1)
    with pytest.warns(InertArgumentWarning, match="skip_memory_metrics=False.*pip install transformers psutil"):
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows())
    assert not [key for key in trainer.train().metrics if "_mem_" in key]


def test_the_metrics_are_shown_as_transformers_shows_them(capsys, make_args, tmp_path):
    args = make_args(output_dir=str(tmp_path))
    metrics = {"train_mem_cpu_alloc_delta": 5 << 20, "before_init_mem_cpu": 7 << 20}
    Trainer(toy.Classifier(), args, train_dataset=toy.rows()).log_metrics("train", metrics)
    assert "5MB" in capsys.readouterr().out
