"""Rename old options of training commands in shell scripts, or leave them to a person."""

from __future__ import annotations

import re

from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.tools.migration.old_arguments import GONE_IN_5, is_flag, is_renamed, switched_on, today
from hf_compat.tools.migration.report import Effect, Rewritten, Spot, Target

_COMMAND = re.compile(r"(?:[^\n]*\\\r*\n)*[^\n]*\n?")  # with its continuation lines
_RUNNERS = re.compile(r"\b(python[\d.]*|torchrun|accelerate|deepspeed|hf-compat|srun)\b")
# Options that only training arguments have. Without one of them, an old name may mean something else.
_TELLTALES = re.compile(
    r"--(per_device_train_batch_size|per_gpu_train_batch_size|num_train_epochs|save_total_limit|evaluation_strategy"
    r"|eval_strategy|gradient_accumulation_steps|overwrite_output_dir|evaluate_during_training)\b"
)
_OPTION = re.compile(r"(?<![\w$\"'-])--(?P<name>[A-Za-z_][\w-]*)(?P<equals>=)?")
_VALUE = re.compile(r"[ \t]+(?:\\\r?\n[ \t]*)?(?P<value>[^\s\\-][^\s\\;&|]*)")
_GAP = re.compile(r"[ \t]*(?:\\\r?\n[ \t]*)?\Z")
_VALUE_AFTER_EQUALS = re.compile(r"(?P<value>[^\s;&|]*)")
_ON = ("true", "1", "yes")
_OFF = ("false", "0", "no")


def rewrite_shell(text: str, target: Target) -> Rewritten:
    """Rewrite the options in a shell script."""
    findings: list[Spot] = []
    mended: list[Spot] = []
    pieces: list[str] = []
    done = 0
    commands = (one for one in _COMMAND.finditer(text) if _RUNNERS.search(one[0]))
    for start, end in (one.span() for one in commands if not one[0].lstrip().startswith("#")):
        is_training = bool(_TELLTALES.search(text, start, end))
        for option in _OPTION.finditer(text, start, end):
            name, name_end = option["name"].replace("-", "_"), option.end("name")
            if name not in OLD_NAMES:
                continue
            found = (_VALUE_AFTER_EQUALS if option["equals"] else _VALUE).match(text, option.end(), end)
            value, value_end = (found["value"], found.end()) if found else ("", name_end)
            new, reason = _current(name, value, target)
            if not is_training:
                new, reason = None, f"if the command takes training arguments, {today(name)}"
            line = text.count("\n", 0, option.start()) + 1
            if reason is not None:
                effect = Effect.FAILS if target is Target.TRANSFORMERS_5 and is_training else Effect.LOOK
                findings.append(Spot(line, f"--{name}", reason, effect=effect))
            if new is not None:
                # A removed option that is alone on its line takes the line along
                word_start = option.start() if new else len(_GAP.sub("", text[: option.start()], count=1))
                pieces += [text[done:word_start], new]
                keeps_value = value.lower() not in (*_ON, *_OFF) if not new else " " not in new
                done = name_end if keeps_value else value_end
                if target is Target.TRANSFORMERS_5:
                    reason = f"transformers 5 has no such option: {today(name)}"
                    mended.append(Spot(line, f"--{name}", reason, effect=Effect.FAILS))
    return Rewritten("".join([*pieces, text[done:]]), tuple(findings), tuple(mended))


def _current(name: str, value: str, target: Target) -> tuple[str | None, str | None]:
    """The replacement of an option, and the reason to look at it. None if there is none."""
    means = OLD_NAMES[name].means
    if is_renamed(name):
        return f"--{means}", None
    if name == "warmup_ratio" and re.fullmatch(r"0?\.\d*[1-9]\d*", value):
        return "--warmup_steps", None
    if is_flag(name) and (not value or value.lower() in _ON):
        current, on = switched_on(name)
        return f"--{current} {' '.join(map(str, on)) if isinstance(on, list) else on}", None
    if name == "overwrite_output_dir" and target is Target.TRANSFORMERS_5:
        return "", None
    if name in ATTRIBUTES_ONLY:
        return None, GONE_IN_5[name] if target is Target.TRANSFORMERS_5 else None
    return None, f"{today(name)}{': take it out' if means.startswith('nothing') else ''}"
