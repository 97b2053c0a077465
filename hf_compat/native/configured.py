"""What LightningCLI leaves as a class path and its arguments: functions, and classmethods such as `from_pretrained`.

jsonargparse makes an object of a class path where a type hint names its class, and not where a function without a type
for its result makes it. These are made here.
"""

from __future__ import annotations

from jsonargparse import Namespace

from hf_compat.data.types import DataSource
from hf_compat.errors import ArgumentError
from hf_compat.interop.class_paths import Made, Spec, build, build_data

ModelSpec = dict[str, Spec]
# Data, or what stands for it. The parser leaves a `dict` as it is: it would write '2024' of a text back as a number.
DataSpec = dict | DataSource  # type: ignore[type-arg]  # the parser looks into dict[str, …]


def made(value: Made, where: str) -> Made:
    """Return what a class path and its arguments stand for; of a mapping of such, each; anything else as it is.

    Args:
        value: What a module or a data module was given.
        where: The name of the argument, for errors.

    Raises:
        ArgumentError: There is no such thing, or it does not take such an argument.
    """
    if type(value).__name__ == "NestedArg":  # jsonargparse's, of a word about a part of something whose type is open
        whole = f'{{"class_path": …, "init_args": {{"{value.key}": {value.val}}}}}'
        raise ArgumentError(
            f"`{where}.init_args.{value.key}={value.val}`: this parser cannot change a part of `{where}`.\n\n"
            f"Hint: `--….{where} '{whole}'` replaces all of it; LightningCLI and `hf-compat fit` take such words."
        )
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, str):
        return build_data(value, where)
    if type(value) is not dict:  # a DatasetDict is the user's
        return value
    if "class_path" in value:
        return build(value, where)
    return {name: made(part, f"{where}.{name}") for name, part in value.items()}
