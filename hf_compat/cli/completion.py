"""`hf-compat completion SHELL` prints a script that completes commands, options and the words that an option takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from hf_compat.cli.main import COMMANDS, parser_of

# zsh runs bash's script through its own emulation of `complete`.
_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"
# bash takes `--name=word` for three words.
_SCRIPT = r"""_hf_compat() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" known=
  if [[ "$word" == "=" ]]; then
    word=
  elif [[ "$before" == "=" ]]; then
    before="${COMP_WORDS[COMP_CWORD-2]}"
  fi
  if [[ $COMP_CWORD == 1 || "$command $before" == "help help" ]]; then
    known="@COMMANDS@"
  else
    case "$command $before" in
@WORDS@
    esac
  fi
  # the words after a script are the script's
  if [[ -z "$known" && "$word" == -* && "${COMP_WORDS[*]}" != *.py\ * ]]; then
    case "$command" in
@OPTIONS@
    esac
  fi
  COMPREPLY=( $(compgen -W "$known" -- "$word") )
}
complete -o default -F _hf_compat hf-compat
"""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat completion",
        description="Print a script that completes commands, options and the words that an option takes. Exit status: "
        "0 printed, 2 an unknown shell.",
        epilog='Write it to a file once, and read that in ~/.bashrc or ~/.zshrc: source "FILE".',
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    shell = make_parser().parse_args(list(words)).shell
    print((_ZSH if shell == "zsh" else "") + completion_script(), end="")  # noqa: T201 - the command's answer
    return 0


def completion_script() -> str:
    """Write the script for bash, with the options of all commands."""
    by_command = {command: _options_of(command) for command in COMMANDS}
    taken = [
        f'      "{command} {option}") known="{" ".join(choices)}" ;;'
        for command, options in by_command.items()
        for option, choices in options.items()
        if choices
    ]
    options = [f'      {command}) known="{" ".join(found)}" ;;' for command, found in by_command.items()]
    script = _SCRIPT.replace("@COMMANDS@", " ".join((*COMMANDS, "help")))
    return script.replace("@WORDS@", "\n".join(taken)).replace("@OPTIONS@", "\n".join(options))


def _options_of(command: str) -> Mapping[str, Sequence[str]]:
    """The long options of a command, each with the words that it takes."""
    from hf_compat.cli.configuration import choices_of
    from hf_compat.hf.legacy import OLD_NAMES
    from hf_compat.hf.rows import ROWS

    options: dict[str, Sequence[str]] = {}
    for action in parser_of(command)._actions:
        name = action.dest.removeprefix("args.")  # arguments of a configuration, which need no section
        if action.help == argparse.SUPPRESS or name in OLD_NAMES:
            continue
        is_argument = action.dest.startswith("args.") and name in ROWS
        choices = choices_of(name) if is_argument else [str(choice) for choice in action.choices or ()]
        for option in action.option_strings:
            if option.startswith("--"):
                options[option.replace("--args.", "--")] = choices
    return options
