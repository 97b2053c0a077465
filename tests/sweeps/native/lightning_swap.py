"""Pytest plugin of `lightning_suite.py`: Lightning's own tests with modules of `HFModule`, or with HF callbacks.

`SWAP` names the mode:

    plain    nothing is swapped, and hf_compat is not imported
    module   each class that the tests derive from LightningModule derives from HFModule with the same body, and
             `automatic_optimization = True`: Lightning makes the updates
    update   the same without that line: HFModule makes the updates of the loss that `training_step` returns. As such a
             module's author does, `accumulate_grad_batches` and `gradient_clip_val` of a trainer are given to the
             arguments. HFModule's own logs are left out, because the tests compare all that is logged
    adapter  each trainer has an `HFCallbackAdapter` as its first callback; the modules are Lightning's

`SWAP_IDS` is a file with the tests to run, one a line. Without it these are the tests whose source makes a module or a
trainer, each with two of its parameter sets. `SWAP_REPORT` gets a line of JSON for each test.
"""

from __future__ import annotations

import functools
import inspect
import json
import linecache
import os
import re
import textwrap
from typing import Any

import pytest

MODE = os.environ.get("SWAP", "plain")
_MAKES = re.compile(r"\b(fit|validate|test|predict|Trainer|cli|CLI)\b\(|Model|Module")
_results: dict[str, dict[str, Any]] = {}
_replaced: list[tuple[Any, str, Any]] = []


class Watching:
    """An HF callback that reads what every HF callback reads."""

    def on_step_end(self, args, state, control, **kwargs):
        assert state.global_step >= 1 and kwargs["model"] is not None


def _base():
    import torch

    from hf_compat import HFModule, TrainingArguments

    class LightningModule(HFModule):
        """What a user writes in place of `LightningModule`. The test's class brings all parameters and parts."""

        def __init__(self, *args, **kwargs):
            super().__init__(torch.nn.Identity(), TrainingArguments(max_grad_norm=0.0, report_to="none"))
            vars(self)["model"] = self._modules.pop("model")  # no row in a summary of the test's parts
            if MODE == "module":
                self.automatic_optimization = True

        def _log_update(self, loss, samples):
            pass

    LightningModule.__qualname__ = "LightningModule"
    return LightningModule


def _swap_modules():
    import lightning.pytorch
    import lightning.pytorch.demos.boring_classes as boring

    base = _base()
    made = {**vars(boring), "LightningModule": base}
    for name in ("BoringModel", "ManualOptimBoringModel", "DemoModel"):
        source = textwrap.dedent(inspect.getsource(getattr(boring, name)))
        file = f"<{name} of HFModule>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # for TorchScript, which reads it
        exec(compile(source, file, "exec"), made)
        made[name].__module__ = boring.__name__
        for home in (boring, lightning.pytorch.demos):
            if name in vars(home):  # for the whole session: tests look it up late, by its path
                setattr(home, name, made[name])
    for owner in (lightning.pytorch, lightning.pytorch.core, lightning.pytorch.core.module):
        _replaced.append((owner, "LightningModule", owner.LightningModule))
        owner.LightningModule = base  # while the tests are imported


def _give_settings_to_the_arguments():
    """Do what an author does whose updates HFModule makes: the arguments say what Lightning's trainer refuses to."""
    import lightning.pytorch

    from hf_compat import HFModule

    original = lightning.pytorch.Trainer.fit

    @functools.wraps(original)
    def fit(self, model, *args, **kwargs):
        says_nothing = isinstance(model, HFModule) and model._said_automatic is None
        if says_nothing and not model.automatic_optimization:
            settings = model.steps.args
            if self.accumulate_grad_batches > 1:
                settings.gradient_accumulation_steps, self.accumulate_grad_batches = self.accumulate_grad_batches, 1
            if self.gradient_clip_val is not None and self.gradient_clip_algorithm in (None, "norm"):
                settings.max_grad_norm, self.gradient_clip_val = float(self.gradient_clip_val), None
        return original(self, model, *args, **kwargs)

    lightning.pytorch.Trainer.fit = fit


def _add_adapters():
    import lightning.pytorch

    from hf_compat import HFCallbackAdapter

    original = lightning.pytorch.Trainer.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.callbacks.insert(0, HFCallbackAdapter(Watching()))

    lightning.pytorch.Trainer.__init__ = init


def _import_lightning():
    # Lightning's own modules keep the real classes: they are imported before the swap
    import lightning.pytorch.cli
    import lightning.pytorch.demos.boring_classes
    import lightning.pytorch.serve.servable_module_validator
    import lightning.pytorch.tuner.lr_finder
    import lightning.pytorch.utilities.deepspeed  # noqa: F401

    import hf_compat.native  # noqa: F401


def swap_in_spawned_process():
    """Swap the modules in a process that a trainer spawns, until its tests are imported.

    `sitecustomize.py` of the suite calls it.
    """
    if MODE not in ("module", "update"):
        return
    _import_lightning()
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

    original = _MultiProcessingLauncher._wrapping_function

    @functools.wraps(original)
    def run(self, *args, **kwargs):
        _end_swap()
        return original(self, *args, **kwargs)

    _swap_modules()
    _MultiProcessingLauncher._wrapping_function = run


def pytest_configure(config):
    if MODE == "plain":
        return
    _import_lightning()
    if MODE == "adapter":
        _add_adapters()
        return
    if MODE == "update":
        _give_settings_to_the_arguments()
    _swap_modules()


def _end_swap():
    while _replaced:
        owner, name, value = _replaced.pop()
        setattr(owner, name, value)


def _record_lightnings_hooks(items):
    """Let the tests that record all methods of a class take Lightning's, without those that HFModule adds."""
    from lightning.pytorch import LightningModule

    def listed(cls, original):
        return original(LightningModule if issubclass(cls, LightningModule) else cls)

    for module in {item.module for item in items if hasattr(item, "module")}:
        if hasattr(module, "get_members"):
            module.get_members = functools.partial(listed, original=module.get_members)


def pytest_collection_modifyitems(config, items):
    _end_swap()
    _record_lightnings_hooks(items)
    given = os.environ.get("SWAP_IDS")
    if given:
        with open(given, encoding="utf-8") as lines:
            wanted = set(lines.read().splitlines())
    else:
        wanted = _chosen(items)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


def _chosen(items):
    by_function: dict[str, list[str]] = {}
    for item in items:
        function = getattr(item, "function", None)
        if function is not None and _MAKES.search(inspect.getsource(function)):
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    return {names[index] for names in by_function.values() for index in (0, -1)}


def pytest_sessionfinish(session):
    _end_swap()  # nothing was collected


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    entry = _results.setdefault(item.nodeid, {"id": item.nodeid, "outcome": "passed", "why": ""})
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        entry["outcome"] = "failed"
        entry["why"] = (
            str(report.longrepr)[-3000:] if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
        )
    elif report.skipped and entry["outcome"] == "passed":
        entry["outcome"] = "skipped"
    if report.when == "teardown":
        with open(os.environ["SWAP_REPORT"], "a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
