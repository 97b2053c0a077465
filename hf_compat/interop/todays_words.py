"""Old names of arguments in a command line, or a configuration, in the words of today."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES, read_old
from hf_compat.hf.value_types import plain
from hf_compat.interop.class_paths import Spec


def read_plain(word: str | bool) -> bool | int | float | str:
    """Read the value of an old name: a truth value, a number, or text."""
    if isinstance(word, bool) or word.lower() in ("true", "false"):
        return str(word).lower() == "true"
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return word


def in_todays_words(prefix: str, name: str, text: str) -> list[str]:
    """Return an argument's word; of an old name, the words of today: they override a configuration file's.

    Args:
        prefix: The place of the arguments, as `args.`.
        name: Of today or old.
        text: The value as it was written.
    """
    today = todays_values(name, read_plain(text)) if name in OLD_NAMES else {}
    if not today:
        return [f"--{prefix}{name}={text}"]
    return [f"--{prefix}{n}={value if isinstance(value, str) else json.dumps(value)}" for n, value in today.items()]


def todays_values(name: str, value: Spec) -> dict[str, Spec]:
    """Return what an old name says in today's; nothing for one that has no effect or no counterpart."""
    row = OLD_NAMES[name]
    if row.inert or name in ATTRIBUTES_ONLY:
        return {}
    translated: Mapping[str, Spec] = row.translate(
        read_old(name, value, checks_of(TrainingArguments, TrainingArguments))
    )
    return {today: plain(said) for today, said in translated.items()}
