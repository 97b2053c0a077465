"""What a run meets outside: trackers, the Hub, devices, processes. Nothing is called over a network."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator
from urllib.parse import urlparse

import torch

from hf_compat.callbacks.loggers import LoggerCallback
from hf_compat.callbacks.trackers import WandbCallback
from hf_compat.errors import HfCompatError
from hf_compat.hf.builtin_callbacks import DefaultFlowCallback, PrinterCallback, ProgressCallback
from hf_compat.hf.callbacks import Callback, is_callback_of
from hf_compat.hf.legacy import asked_by, read_old
from hf_compat.hf.old_attributes import declared_old_names, keeps_its_meaning
from hf_compat.hf.value_types import plain
from hf_compat.interop.transformers_models import notebooks_callback
from hf_compat.plan.translate import translate
from hf_compat.runtime.launch import variable
from hf_compat.runtime.text import shown
from hf_compat.tools.preflight.session import Session

TRACKERS, HUB, DEVICES, ARGUMENTS = "trackers", "hub", "devices", "arguments"
_SILENT = (DefaultFlowCallback, PrinterCallback, ProgressCallback)
# Trackers that need a key, by the callback's class: the variable, and how to log in.
_KEYS = {
    "CometCallback": ("COMET_API_KEY", "comet login"),
    "NeptuneCallback": ("NEPTUNE_API_TOKEN", "export NEPTUNE_API_TOKEN=…"),
    "SwanLabCallback": ("SWANLAB_API_KEY", "swanlab login"),
    "ClearMLCallback": ("CLEARML_API_ACCESS_KEY", "clearml-init"),
}
_FILES = {
    "CometCallback": "~/.comet.config",
    "SwanLabCallback": "~/.swanlab/.netrc",
    "ClearMLCallback": "~/clearml.conf",
}


def check_trackers(session: Session) -> None:
    """Look for the keys that trackers log in with; no run is begun."""
    with session.checking(TRACKERS):
        for callback in session.trainer.callback_handler.callbacks:
            if is_callback_of(callback, WandbCallback):
                _check_wandb(session)
            else:
                _check_key(session, type(callback).__name__)


def _check_key(session: Session, name: str) -> None:
    if name not in _KEYS:
        return
    key, login = _KEYS[name]
    if variable(key) is None and not os.path.exists(os.path.expanduser(_FILES.get(name, os.devnull + "/none"))):
        session.error(
            TRACKERS, f"{name} has no key: the variable {key} is not set.",
            f"`{login}`, or leave it out of `report_to`",
        )  # fmt: skip


def _check_wandb(session: Session) -> None:
    mode = (variable("WANDB_MODE") or "").lower()
    wandb = sys.modules.get("wandb")
    runs = getattr(wandb, "run", None) is not None
    if mode in ("offline", "disabled", "dryrun") or runs or not session.trainer.args.should_log:
        return
    if variable("WANDB_API_KEY") or variable("WANDB_IDENTITY_TOKEN_FILE") or _has_netrc(_host_of_wandb()):
        return
    session.error(
        TRACKERS,
        f"wandb has no key for {_host_of_wandb()}: a run would ask for one, or fail without a terminal.",
        "`wandb login`, set WANDB_API_KEY, set WANDB_MODE=offline, or set `report_to='none'`",
    )


def _host_of_wandb() -> str:
    return urlparse(variable("WANDB_BASE_URL") or "").hostname or "api.wandb.ai"


def _has_netrc(host: str) -> bool:
    path = variable("NETRC") or os.path.expanduser("~/.netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def check_hub(session: Session) -> None:
    """Look for the token that pushes need."""
    args = session.trainer.args
    if not args.push_to_hub:
        return
    with session.checking(HUB):
        if args.hub_token is None and not _stored_token():
            session.error(
                HUB,
                "`push_to_hub=True`, and no token was found: neither `hub_token`, nor the variable HF_TOKEN, nor "
                "a log-in.",
                "`hf auth login`, or set HF_TOKEN",
            )


def _stored_token() -> bool:
    path = variable("HF_TOKEN_PATH") or os.path.join(
        variable("HF_HOME") or os.path.join(variable("XDG_CACHE_HOME") or "~/.cache", "huggingface"), "token"
    )
    return bool(variable("HF_TOKEN") or os.path.exists(os.path.expanduser(path)))


def check_devices(session: Session) -> None:
    """Ask the plan for its strategy, and compare processes with devices."""
    trainer = session.trainer
    with session.checking(DEVICES):
        try:
            plan = translate(trainer.args, session.counts, getattr(trainer.model, "config", None))
        except HfCompatError as error:
            session.raised(error, DEVICES, "The run cannot be planned")
            return
        session.strategy = plan.strategy
        world = trainer.args.world_size
        told = f" in {world} processes by {plan.strategy}" if world > 1 else ""
        session.measured.append(f"trains on {plan.device}{told}, precision {plan.precision}")
        args = session.trainer.args
        visible = torch.cuda.device_count()
        if args.device.type == "cpu" and visible and not args.use_cpu:
            session.warn(
                DEVICES, f"{visible} GPUs are there, and the run is on the CPU.", "look at CUDA_VISIBLE_DEVICES"
            )
        elif visible > 1 and args.world_size == 1 and args.device.type == "cuda":
            session.note(
                DEVICES, f"{visible} GPUs are visible, and one process uses one of them.",
                f"`hf-compat run --devices {visible} …` uses all",
            )  # fmt: skip


def tell_of_old_fields(session: Session) -> None:
    """Say which old names the arguments' class declares as fields: obeyed here, ignored by transformers 5."""
    args = session.trainer.args
    for name, default in declared_old_names(type(args)).items():
        if keeps_its_meaning(name, default, args._checks()):
            value = getattr(args, name)
            for new in asked_by(name, read_old(name, value, args._checks())):
                session.note(
                    ARGUMENTS,
                    f"`{type(args).__name__}` declares the old name `{shown(name, value)}`: this sets "
                    f"`{shown(new, plain(getattr(args, new)))}`, while transformers 5 ignores it.",
                    f"declare or set `{new}`",
                )


def tell_of_callbacks(session: Session) -> None:
    """Say which callbacks were not called, so that nobody takes them for checked."""
    trainer = session.trainer
    left_out = [*_own(trainer.callback_handler.callbacks), *(type(c).__name__ for c in trainer._callbacks.lightning)]
    if left_out:
        session.leave_out("callbacks", f"none of their methods was called: {', '.join(left_out)}")


def _own(callbacks: list[Callback]) -> Iterator[str]:
    for one in callbacks:
        if not any(is_callback_of(one, kind) for kind in _SILENT) and type(one) is not notebooks_callback():
            yield type(one.logger if isinstance(one, LoggerCallback) else one).__name__
