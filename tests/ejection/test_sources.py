"""What is cut out of a script: functions, classes and lambdas, with what they use."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from hf_compat.hf.metrics import speed_metrics
from hf_compat.tools.ejection.expressions import Expressions, ProjectFiles
from hf_compat.tools.ejection.findings import CannotBeWritten
from hf_compat.tools.ejection.model_part import _options_of_parts
from hf_compat.tools.ejection.recording import Recorder

SCRIPT = """import numpy as np
from math import sqrt

# How large.
SIZE = 3
names = ["a", "b"]


def helper(x):
    return np.sqrt(x) * SIZE + len(names)


def metrics(p):
    return {"score": helper(p), "other": sqrt(2)}


short = lambda p: {"size": SIZE}


def make():
    share = 0.5

    def inner(p):
        return share * helper(p)

    return inner


class Holder:
    def __init__(self, size):
        self.size = size

    def __call__(self, p):
        return self.size


def add(share):
    def inner(p):
        return share + p

    return inner


several = [add(2), add(3), *(early(0.5) for early in [lambda k: lambda p: p * k]), lambda p, by=SIZE: p - by]
on_one_line = [lambda p: p + 1, lambda q: q + 5]
of_a_loop = [lambda p, k=k: p * k for k in (2.5, 3.5)]
file = open(__file__)


def reads(p):
    return file.read()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "user_script_of_a_test.py"
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    recorder = Recorder(tmp_path)
    with recorder.listening():
        spec.loader.exec_module(module)
        module.held = module.Holder(4)
    yield module, Expressions(recorder, ProjectFiles())
    module.file.close()
    del sys.modules[path.stem]


def made(write, expression):
    namespace: dict[str, object] = {}
    exec(write.code.text(), namespace)
    return eval(expression, namespace)


def test_a_function_brings_what_it_uses(script):
    module, write = script
    expression = write.of(module.metrics)
    assert "# How large.\nSIZE = 3" in write.code.text() and "make" not in write.code.text()
    assert made(write, expression)(4) == module.metrics(4)


def test_a_lambda_a_closure_and_an_instance(script):
    module, write = script
    for value in (module.short, module.make(), module.held):
        assert made(write, write.of(value))(4) == value(4)


@pytest.mark.parametrize("name", ["several", "on_one_line", "of_a_loop"])
def test_functions_of_one_source_keep_their_own_values(script, name):
    module, write = script
    functions = getattr(module, name)
    expressions = [write.of(function) for function in functions]
    assert [made(write, expression)(4) for expression in expressions] == [function(4) for function in functions]


ENCLOSED = """import functools

SHIFT = 1


def make(k, other):
    def inner(x, n=k, *, m=[k, 2], shift=SHIFT):
        return x * n + m[0] + shift + other

    class Scaled:
        def __init__(self, n=k + 1, of=inner):
            self.n, self.of = n, of

        def __call__(self, x):
            return self.of(x) * self.n

        @staticmethod
        def plus(x, n=k):
            return x + n

    return inner, Scaled(), Scaled.plus


first, second = make(3, 5), make(4, 6)
"""


def test_defaults_from_an_enclosing_function_keep_their_values(tmp_path):
    path = tmp_path / "enclosing_of_a_test.py"
    path.write_text(ENCLOSED)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    recorder = Recorder(tmp_path)
    try:
        with recorder.listening():
            spec.loader.exec_module(module)
        write = Expressions(recorder, ProjectFiles()).code
        for inner, scaled, _ in (module.first, module.second):
            names = [write.add(inner), write.add(type(scaled))]
            namespace: dict[str, object] = {}
            exec(write.text(), namespace)
            assert namespace[names[0]](4) == inner(4)
            assert namespace[names[1]]()(4) == scaled(4) and namespace[names[1]].plus(4) == scaled.plus(4)
    finally:
        del sys.modules[path.stem]


STATEFUL = """from transformers.trainer import TRAINING_ARGS_NAME, has_length, is_peft_available, speed_metrics

BEST = {"score": -1.0}
CALLS = 0


def counter(step):
    calls, seen = 0, []

    def count(value):
        nonlocal calls
        calls += step
        seen.append(value)

        def told():
            nonlocal value
            value += 1
            return value, calls, len(seen)

        return told()

    return count


def keep(score):
    global CALLS
    CALLS += 1
    BEST["score"] = max(BEST["score"], score)
    return BEST["score"]


def of_the_trainer(rows):
    return TRAINING_ARGS_NAME, has_length(rows), is_peft_available(), len(speed_metrics("a", 0.0))


one, other = counter(1), counter(1)
one(4)
keep(0.5)
"""


@pytest.fixture
def stateful(tmp_path, monkeypatch):
    for home in ("trainer", "trainer_utils"):  # as `eject` runs a script
        monkeypatch.setattr(f"transformers.{home}.speed_metrics", speed_metrics)
    path = tmp_path / "stateful_of_a_test.py"
    path.write_text(STATEFUL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module, Expressions(Recorder(tmp_path), ProjectFiles())
    del sys.modules[path.stem]


def test_functions_go_on_from_the_state_that_they_had(stateful):
    module, write = stateful
    names = [write.of(function) for function in (module.one, module.other, module.keep)]
    namespace: dict[str, object] = {}
    exec(write.code.text(), namespace)
    for name, function in zip(names, (module.one, module.other, module.keep), strict=True):
        for value in (0.25, 7):
            assert namespace[name](value) == function(value)
    assert module.one(1) == (2, 4, 4) and module.other(1) == (2, 3, 3) and namespace["CALLS"] == module.CALLS == 3


def test_what_the_trainers_module_only_passes_on_is_taken_over(stateful):
    module, write = stateful
    name = write.of(module.of_the_trainer)
    text = write.code.text()
    assert "transformers.trainer " not in text and 'TRAINING_ARGS_NAME = "training_args.bin"' in text
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert namespace[name]([1]) == module.of_the_trainer([1])


def test_things_of_one_name_in_two_modules_stay_two(script, tmp_path):
    module, write = script
    other = tmp_path / "other_module_of_a_test.py"
    other.write_text(
        "SIZE = 7\n\n\ndef helper(x):\n    return SIZE * x\n\n\ndef twice(x, of=helper):\n    return 2 * helper(x)\n"
    )
    spec = importlib.util.spec_from_file_location(other.stem, other)
    sys.modules[other.stem] = imported = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(imported)
        both = [module.metrics, imported.twice, imported.helper]
        rebuilt_with_base = [made(write, write.of(function)) for function in both]
        assert [function(4) for function in rebuilt_with_base] == [function(4) for function in both]
        assert write.code.text().count("SIZE") > 3 and "helper_of_other_module_of_a_test" in write.code.text()
    finally:
        del sys.modules[other.stem]


def test_what_was_set_on_an_object_later_is_set_again(script):
    module, write = script
    module.held.size = 9
    write.recorder.settle()
    assert write.of(module.held) == "with_attributes(Holder(4), size=9)"


def test_what_cannot_be_made_again_is_named(script):
    module, write = script
    with pytest.raises(CannotBeWritten, match=r"'file' in .* is needed"):
        write.of(module.reads)


def test_a_stream_is_written_by_the_calls_that_made_it(tmp_path):
    from datasets import Dataset, IterableDataset

    recorder = Recorder(tmp_path)
    with recorder.listening():
        table = Dataset.from_list([{"x": number} for number in range(6)])
        stream = table.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=3).take(4)
    write = Expressions(recorder, ProjectFiles())
    written = write.of(stream)
    assert written == (
        'load_from_disk(Path(__file__).parent / "data/table").to_iterable_dataset(num_shards=2)'
        ".shuffle(seed=1, buffer_size=3).take(4)"
    )
    later = stream.take(2)  # nobody listens any more
    assert recorder.origin_of(later) is None and not hasattr(IterableDataset.take, "__wrapped__")


def test_a_schedule_is_written_by_the_call_that_made_it(tmp_path):
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    recorder = Recorder(tmp_path)
    with recorder.listening():
        made = [
            torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
            get_linear_schedule_with_warmup(optimizer, 2, num_training_steps=9),
        ]
    write = Expressions(recorder, ProjectFiles(), known={id(optimizer): "optimizer"})
    assert [write.of(schedule) for schedule in made] == [
        "StepLR(optimizer, 3, gamma=0.5)",
        "get_linear_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=2, num_training_steps=9)",
    ]


def test_a_part_keeps_what_its_own_configuration_says(tmp_path):
    """The Trainer switches the cache off in the model's configuration alone: a decoder that has one goes on with it."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=30, **sizes))
    model.config.use_cache = False
    model.save_pretrained(tmp_path)
    again = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert again.decoder.config.use_cache is False
    lines = _options_of_parts("model", model, again)
    assert lines == ["model.decoder.config.use_cache = True"]
    exec(lines[0], {"model": again})
    assert again.decoder.config.use_cache is True and again.config.use_cache is False
