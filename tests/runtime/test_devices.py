"""Which device a process trains on, by what torch finds and what its launcher says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_compat.errors import ArgumentError
from hf_compat.runtime import devices
from hf_compat.runtime.devices import choose_device

ALONE = {"local_process_index": 0, "process_index": 0, "world_size": 1, "unsaid": ""}


@pytest.mark.parametrize(
    ("found", "use_cpu", "place", "expected"),
    [
        ({}, False, {}, "cpu"),
        ({"gpus": 1}, False, {}, "cuda:0"),
        ({"gpus": 4}, False, {"local_process_index": 3, "world_size": 4}, "cuda:3"),
        ({"gpus": 2}, False, {"local_process_index": 3, "world_size": 4}, "cuda:1"),
        ({"gpus": 1}, False, {"local_process_index": 3, "world_size": 4, "unsaid": "LOCAL_RANK"}, "cuda:0"),
        ({"gpus": 2}, False, {"world_size": 4, "unsaid": "LOCAL_RANK"}, "`LOCAL_RANK`, which would say"),
        ({"gpus": 2}, False, {"world_size": 4}, "cuda:0"),
        ({"gpus": 0, "is_available": True}, False, {}, "cuda:0"),
        ({"gpus": 1}, True, {}, "cpu"),
        ({"gpus": 1, "ACCELERATE_USE_CPU": "true"}, False, {}, "cpu"),
        ({"gpus": 1, "ACCELERATE_USE_CPU": "false"}, False, {}, "cuda:0"),
        ({"mps": True}, False, {}, "mps"),
        ({"mps": True}, True, {}, "cpu"),
        ({"mps": True}, False, {"world_size": 2}, "no process group for"),
        ({"gpus": 1, "mps": True}, False, {}, "cuda:0"),
        ({"other": "xpu"}, False, {}, "an accelerator of type 'xpu'"),
        ({"other": "xpu"}, True, {}, "cpu"),
        ({"assumed": "cuda:1", "gpus": 0}, False, {}, "cuda:1"),
        ({"assumed": "cuda:1"}, True, {}, "cpu"),
    ],
)
def test_the_device_of_a_process(monkeypatch, found, use_cpu, place, expected):
    gpus, other = found.get("gpus"), found.get("other")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: found.get("mps", False))
    current = None if other is None else torch.device(other)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: current)
    monkeypatch.setattr(devices, "assumed_device", lambda: found.get("assumed"))
    monkeypatch.setattr(devices, "environment", {k: v for k, v in found.items() if k.isupper()})
    launch = SimpleNamespace(**{**ALONE, **place})
    if " " in expected:
        with pytest.raises(ArgumentError, match=expected):
            choose_device(use_cpu, launch)
    else:
        assert choose_device(use_cpu, launch) == torch.device(expected)
