"""Shell scripts: old names among the options of commands that train, renamed or left to a person."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.tools.migration.old_arguments import GONE_IN_5, is_flag, is_renamed, switched_on, today
from hf_compat.tools.migration.report import Effect, Finding, Rewritten, Target

_RUNNERS = re.compile(r"\b(python[\d.]*|torchrun|accelerate|deepspeed|hf-compat|srun)\b")
# Options that only training arguments have: without one of them a command may mean something else by an old name.
_TELLTALES = re.compile(
    r"--(per_device_train_batch_size|per_gpu_train_batch_size|num_train_epochs|save_total_limit|evaluation_strategy"
    r"|eval_strategy|gradient_accumulation_steps|overwrite_output_dir|evaluate_during_training)\b"
)
_OPTION = re.compile(r"(?<![\w$\"'-])--(?P<name>[A-Za-z_][\w-]*)(?P<equals>=)?")
_VALUE = re.compile(r"[ \t]+(?:\\\r?\n[ \t]*)?(?P<value>[^\s\\-][^\s\\;&|]*)")
_GAP = re.compile(r"[ \t]*(?:\\\r?\n[ \t]*)?\Z")
_ON = ("true", "1", "yes")
_OFF = ("false", "0", "no")


@dataclass(frozen=True, slots=True)
class _Word:
    """An option of an old name.

    Args:
        name: Of the argument.
        start: Of the option in the text.
        end: After the option's name.
        value: What follows as its value; empty where nothing does.
        value_end: After the value.
    """

    name: str
    start: int
    end: int
    value: str
    value_end: int


def rewrite_shell(text: str, target: Target) -> Rewritten:
    """Return a shell script with today's options.

    Args:
        text: The script.
        target: What the result is for.
    """
    findings: list[Finding] = []
    mended: list[Finding] = []
    pieces: list[str] = []
    done = 0
    for start, end in _commands(text):
        is_training = bool(_TELLTALES.search(text, start, end))
        for word in _old_words(text, start, end):
            new, reason = (
                _today(word, target)
                if is_training
                else (None, f"if the command takes training arguments, {today(word.name)}")
            )
            if reason is not None:
                line = text.count("\n", 0, word.start) + 1
                effect = Effect.FAILS if target is Target.TRANSFORMERS_5 and is_training else Effect.LOOK
                findings.append(Finding(line, f"--{word.name}", reason, effect=effect))
            if new is not None:
                # What goes takes the line that it stands on alone along
                start_of_word = word.start if new else len(_GAP.sub("", text[: word.start], count=1))
                pieces += [text[done:start_of_word], new]
                is_flag_alone = not new and word.value.lower() not in (*_ON, *_OFF)
                done = word.end if is_flag_alone or (new.startswith("--") and " " not in new) else word.value_end
                if target is Target.TRANSFORMERS_5:
                    reason = f"transformers 5 has no such option: {today(word.name)}"
                    line = text.count("\n", 0, word.start) + 1
                    mended.append(Finding(line, f"--{word.name}", reason, effect=Effect.FAILS))
    return Rewritten("".join([*pieces, text[done:]]), tuple(findings), tuple(mended))


def _commands(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of commands that run Python, lines that go on taken together; comments are none."""
    start = 0
    while start < len(text):
        end = start
        while True:
            newline = text.find("\n", end)
            end = len(text) if newline < 0 else newline + 1
            if newline < 0 or not text[:newline].rstrip("\r").endswith("\\"):
                break
        command = text[start:end]
        if _RUNNERS.search(command) and not command.lstrip().startswith("#"):
            yield start, end
        start = end


def _old_words(text: str, start: int, end: int) -> Iterator[_Word]:
    for found in _OPTION.finditer(text, start, end):
        name = found["name"].replace("-", "_")
        if name not in OLD_NAMES:
            continue
        after = re.compile(r"(?P<value>[^\s;&|]*)") if found["equals"] else _VALUE
        value = after.match(text, found.end(), end)
        name_end = found.end("name")
        yield _Word(name, found.start(), name_end, value["value"] if value else "", value.end() if value else name_end)


def _today(word: _Word, target: Target) -> tuple[str | None, str | None]:
    """Return what stands in a word's place, and what a person has to know; None of each where nothing."""
    means = OLD_NAMES[word.name].means
    if is_renamed(word.name):
        return f"--{means}", None
    if word.name == "warmup_ratio" and re.fullmatch(r"0?\.\d*[1-9]\d*", word.value):
        return "--warmup_steps", None
    if is_flag(word.name) and (not word.value or word.value.lower() in _ON):
        current, on = switched_on(word.name)
        value = " ".join(map(str, on)) if isinstance(on, list) else str(on)
        return f"--{current} {value}", None
    if word.name == "overwrite_output_dir" and target is Target.TRANSFORMERS_5:
        return "", None
    if word.name in ATTRIBUTES_ONLY:
        return None, GONE_IN_5[word.name] if target is Target.TRANSFORMERS_5 else None
    return None, f"{today(word.name)}{': take it out' if means.startswith('nothing') else ''}"
