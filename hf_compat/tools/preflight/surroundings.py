"""Check what a run meets outside: trackers, the Hub, old fields, callbacks. Nothing is called over a network."""

from __future__ import annotations

import netrc
import os
import sys
from urllib.parse import urlparse

from hf_compat.callbacks.loggers import LoggerCallback
from hf_compat.callbacks.trackers import WandbCallback
from hf_compat.hf.callbacks import DefaultFlowCallback, PrinterCallback, ProgressCallback, is_callback_of
from hf_compat.hf.legacy import OLD_NAMES, declared_old_names, keeps_its_meaning, read_old
from hf_compat.hf.value_types import plain
from hf_compat.interop.transformers_models import notebooks_callback
from hf_compat.plan.argument_support import inert_settings
from hf_compat.runtime.launch import environment
from hf_compat.runtime.text import shown
from hf_compat.tools.preflight.session import Session
from hf_compat.trainer_methods.run_parts import run_parts

TRACKERS, HUB, ARGUMENTS = "trackers", "hub", "arguments"
_SILENT = (DefaultFlowCallback, PrinterCallback, ProgressCallback)
# Trackers that need a key, by the callback's class: the variable, how to log in, and a file with the key.
_KEYS = {
    "CometCallback": ("COMET_API_KEY", "comet login", "~/.comet.config"),
    "NeptuneCallback": ("NEPTUNE_API_TOKEN", "export NEPTUNE_API_TOKEN=…", ""),
    "SwanLabCallback": ("SWANLAB_API_KEY", "swanlab login", "~/.swanlab/.netrc"),
    "ClearMLCallback": ("CLEARML_API_ACCESS_KEY", "clearml-init", "~/clearml.conf"),
}


def check_trackers(session: Session) -> None:
    """Look for the keys with which trackers log in. No run is begun."""
    with session.checking(TRACKERS):
        for callback in session.trainer.callback_handler.callbacks:
            name = type(callback).__name__
            if is_callback_of(callback, WandbCallback):
                mode = (environment.get("WANDB_MODE") or "").lower()
                runs = getattr(sys.modules.get("wandb"), "run", None) is not None
                if mode in ("offline", "disabled", "dryrun") or runs or not session.trainer.args.should_log:
                    continue
                host = urlparse(environment.get("WANDB_BASE_URL") or "").hostname or "api.wandb.ai"
                try:
                    stored = (
                        netrc.netrc(environment.get("NETRC") or os.path.expanduser("~/.netrc")).authenticators(host)
                        is not None
                    )
                except (OSError, netrc.NetrcParseError):
                    stored = False
                if not (stored or environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE")):
                    session.error(
                        TRACKERS,
                        f"wandb has no key for {host}: a run would ask for one, or fail without a terminal.",
                        "`wandb login`, set WANDB_API_KEY, set WANDB_MODE=offline, or set `report_to='none'`",
                    )
            elif name in _KEYS:
                key, login, file = _KEYS[name]
                if environment.get(key) is None and not os.path.exists(os.path.expanduser(file)):
                    problem = f"{name} has no key: the variable {key} is not set."
                    session.error(TRACKERS, problem, f"`{login}`, or leave it out of `report_to`")


def check_hub(session: Session) -> None:
    """Look for the token that pushes need."""
    args = session.trainer.args
    if not args.push_to_hub:
        return
    with session.checking(HUB):
        home = environment.get("HF_HOME") or os.path.join(
            environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
        )
        path = os.path.expanduser(environment.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
        if args.hub_token is None and not environment.get("HF_TOKEN") and not os.path.exists(path):
            session.error(
                HUB,
                "`push_to_hub=True`, and no token was found: neither `hub_token`, nor the variable HF_TOKEN, nor "
                "a log-in.",
                "`hf auth login`, or set HF_TOKEN",
            )


def tell_of_old_fields(session: Session) -> None:
    """Note old names that the arguments' class declares as fields. This package obeys them, transformers 5 does not."""
    args = session.trainer.args
    for name, default in declared_old_names(type(args)).items():
        if keeps_its_meaning(name, default, args._checks()):
            value = getattr(args, name)
            for new in OLD_NAMES[name].translate(read_old(name, value, args._checks())):
                session.note(
                    ARGUMENTS,
                    f"`{type(args).__name__}` declares the old name `{shown(name, value)}`: this sets "
                    f"`{shown(new, plain(getattr(args, new)))}`, while transformers 5 ignores it.",
                    f"declare or set `{new}`",
                )


def tell_of_inert_settings(session: Session) -> None:
    """Note the settings that have no effect in this run, each with the reason."""
    for one in inert_settings(session.trainer.args, run_parts(session.trainer)):
        session.note(ARGUMENTS, f"`{shown(one.name, one.value)}` has no effect: {one.why}.", "leave it out")


def tell_of_callbacks(session: Session) -> None:
    """Name the callbacks that were not called and so are not checked."""
    trainer = session.trainer
    named = [
        type(one.logger if isinstance(one, LoggerCallback) else one).__name__
        for one in trainer.callback_handler.callbacks
        if not any(is_callback_of(one, kind) for kind in _SILENT) and type(one) is not notebooks_callback()
    ]
    named += [type(one).__name__ for one in trainer._callbacks.lightning]
    if named:
        session.leave_out("callbacks", f"none of their methods was called: {', '.join(named)}")
