"""Schedule-free optimizers: they average the weights they have trained, in place of a learning rate that decays.

`optim/stepping.py` switches between the weights that are trained and their average.
"""

from __future__ import annotations

from hf_compat.errors import warn_once
from hf_compat.hf.enums import OptimizerNames
from hf_compat.optim.entries import (
    FINITE,
    ClassAndKeywords,
    ClassSource,
    OptimizerClass,
    OptimizerEntry,
    OptimizerRequest,
    Option,
)

_OPTIONS = {"weight_lr_power": Option(FINITE, 2.0), "r": Option(FINITE, 0.0)}


def _radam(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {**request.adam, "weight_decay": request.args.weight_decay, **request.options}


def _adamw(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, {**request.adam, **_with_warmup(request)}


def _sgd(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    return found, _with_warmup(request)


def _with_warmup(request: OptimizerRequest) -> dict[str, object]:
    args = request.args
    return {"weight_decay": args.weight_decay, "warmup_steps": args.warmup_steps, **request.options}


def _warn_of_share(request: OptimizerRequest) -> None:
    """Warn of a warm-up that is a share of the run: the optimizer takes it for updates, as upstream hands it on."""
    steps = request.args.warmup_steps
    if 0 < steps < 1:
        warn_once(
            f"`warmup_steps={steps}`: `optim={request.name!r}` warms up itself and takes this for updates, not for a "
            f"share of the run, as in transformers: its first step is {1 / steps:g} times `learning_rate`.\n\n"
            "Hint: give a number of updates."
        )


def _source(name: str, release: str = "") -> ClassSource:
    return ClassSource(modules=("schedulefree",), name=name, install=f"schedulefree{release}")


SCHEDULE_FREE_OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.SCHEDULE_FREE_RADAM: OptimizerEntry(
        source=_source("RAdamScheduleFree", ">=1.4.0"), options=_OPTIONS, choose=_radam
    ),
    OptimizerNames.SCHEDULE_FREE_ADAMW: OptimizerEntry(
        source=_source("AdamWScheduleFree"), options=_OPTIONS, choose=_adamw, check=_warn_of_share
    ),
    OptimizerNames.SCHEDULE_FREE_SGD: OptimizerEntry(
        source=_source("SGDScheduleFree"), options=_OPTIONS, choose=_sgd, check=_warn_of_share
    ),
}
