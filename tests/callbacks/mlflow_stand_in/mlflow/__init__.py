"""As much of MLflow's fluent interface as `transformers.integrations.MLflowCallback` calls. Runs are JSON files.

`tests/callbacks/test_mlflow.py` runs with this one, and with the real package where it is installed.
"""

from __future__ import annotations

import atexit
import json
import os
import uuid
from pathlib import Path
from types import SimpleNamespace

from mlflow.utils import validation as validation

__version__ = "3.17.2"
_active: list[SimpleNamespace] = []


def _file(run_id: str) -> Path:
    return Path(os.environ["MLFLOW_TRACKING_URI"].removeprefix("file://")) / f"{run_id}.json"


def _write(run_id: str, **values: object) -> dict:
    path = _file(run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {**(json.loads(path.read_text()) if path.exists() else {"metrics": []}), **values}
    path.write_text(json.dumps(found))
    return found


def is_tracking_uri_set() -> bool:
    return True


def get_tracking_uri() -> str:
    return os.environ["MLFLOW_TRACKING_URI"]


def active_run() -> SimpleNamespace | None:
    return _active[-1] if _active else None


def start_run(run_name: str | None = None, nested: bool = False) -> SimpleNamespace:
    assert nested or not _active, "a run is active already"
    run_id = os.environ.pop("MLFLOW_RUN_ID", None)
    if run_id is not None and not _file(run_id).exists():
        raise ValueError(f"Run '{run_id}' not found")
    run_id = run_id or uuid.uuid4().hex
    _write(run_id, status="RUNNING")
    _active.append(SimpleNamespace(info=SimpleNamespace(run_id=run_id)))
    return _active[-1]


def end_run(status: str = "FINISHED") -> None:
    if _active:
        _write(_active.pop().info.run_id, status=status)


atexit.register(end_run)


def log_params(params: dict, synchronous: bool = True) -> None:
    assert _active


def log_metrics(metrics: dict, step: int, synchronous: bool = True) -> None:
    run_id = _active[-1].info.run_id
    known = _write(run_id)["metrics"]
    _write(run_id, metrics=[*known, *([name, step, value] for name, value in metrics.items())])


def search_runs(output_format: str) -> list[SimpleNamespace]:
    files = sorted(_file("x").parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
    info = [SimpleNamespace(run_id=path.stem, status=json.loads(path.read_text())["status"]) for path in files]
    return [SimpleNamespace(info=one) for one in info]


class MlflowClient:
    def get_metric_history(self, run_id: str, name: str) -> list[SimpleNamespace]:
        known = json.loads(_file(run_id).read_text())["metrics"]
        return [SimpleNamespace(step=step, value=value) for metric, step, value in known if metric == name]
