"""`hf-compat run script.py ARGS…`: an HF script, unchanged, on Lightning's engine, in one process a GPU.

`--devices N` starts as many processes as it says.

`-m package.module` in place of the script runs a module.

Processes are started by torch's elastic launcher, which Lightning's own `fabric run` uses: it ends all of them when one
fails, and may start them again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import torch

from hf_compat.errors import ArgumentError, HfCompatError
from hf_compat.hf.profiles import NEWEST, PROFILES, VARIABLE, followed
from hf_compat.interop import child_site, patching
from hf_compat.interop.user_script import require_script, run_module, run_script
from hf_compat.runtime.launch import (
    end_with_launcher,
    is_launched,
    let_children_import_from,
    read_launch,
    set_for_children,
    variable,
    wants_cpu,
)
from hf_compat.runtime.text import shown


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat run", description="Run an HF script, unchanged, on Lightning's engine."
    )
    parser.add_argument(
        "--devices", help="processes on this machine: a number, or auto (one a visible GPU), which is the default"
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--node-rank", type=int, default=0, help="which machine this is")
    parser.add_argument("--main-address", default="127.0.0.1", help="address of the first of several machines")
    parser.add_argument("--main-port", type=int, default=None, help="port there (a free one on a single machine)")
    parser.add_argument("--restarts", type=int, default=0, help="times that a failed run is started again")
    parser.add_argument(
        "--compat",
        choices=tuple(PROFILES),
        help="generation of transformers whose defaults count: that of the installed one by default",
    )
    parser.add_argument("--launcher", type=int, default=None, help=argparse.SUPPRESS)  # process id, for a rank
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in `python -m`")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit status. What a script raises is raised."""
    chosen = make_parser().parse_args(list(words))
    try:
        # How many processes this machine is to start; 1 where this process is all, or one of those started
        if not chosen.module:
            require_script(chosen.script, "hf-compat run [options] SCRIPT [arguments]")
        launched = read_launch().world_size
        processes = _processes(chosen)
        if launched > 1 and processes * chosen.nodes > 1:
            raise ArgumentError(
                f"A launcher has started {launched} processes already, and `--devices`, `--nodes` ask for more.\n\n"
                "Hint: leave them out, or the launcher."
            )
        if processes * chosen.nodes > 1:
            return _launch(chosen, processes)
        if chosen.compat is not None:
            set_for_children(VARIABLE, chosen.compat)
        patching.patch()
        tell_defaults()
    except HfCompatError as error:
        _say(str(error))
        return 2
    run_here(chosen)
    return 0


def _processes(chosen: argparse.Namespace) -> int:
    """Return the processes to start: as many as `--devices` says, else one a GPU where no launcher has started this.

    Raises:
        ArgumentError: `--devices` is no number.
    """
    if chosen.devices is not None:
        return number_of(chosen.devices)
    if is_launched() or wants_cpu() or _ON_CPU.intersection(chosen.arguments):
        return 1
    processes = number_of("auto")
    if processes > 1:
        _say(f"hf-compat run: {processes} GPUs, one process each (`--devices 1` for one of them)")
    return processes


# Words of a script that trains on the CPU
_ON_CPU = frozenset({"--use_cpu", "--use_cpu=true", "--use_cpu=True", "--no_cuda", "--no_cuda=true", "--no_cuda=True"})


def tell_defaults() -> None:
    """Say which defaults count, where the installed release has others than today's."""
    guest = followed()
    if guest is None or not guest.defaults or read_launch().process_index > 0:
        return
    if (variable(VARIABLE) or guest.generation) != guest.generation:  # `--compat` has set it, or the environment
        return
    defaults = ", ".join(shown(name, value) for name, value in guest.defaults.items())
    today = f"; `--compat {NEWEST}` has today's" if guest.generation != NEWEST else ""
    _say(f"hf-compat run: transformers {guest.release} is installed, and its defaults count ({defaults}){today}.")


def number_of(devices: str) -> int:
    """Return the processes that `--devices` asks for.

    Raises:
        ArgumentError: It is no number.
    """
    if devices == "auto":
        return max(torch.cuda.device_count(), 1)
    if not devices.isdigit() or int(devices) < 1:
        raise ArgumentError(f"`--devices {devices}` is no number of processes.\n\nHint: 2, say, or auto.")
    return int(devices)


def run_here(chosen: argparse.Namespace) -> None:
    """Run a script in this process, where transformers is patched; the Pythons that it starts patch theirs."""
    if chosen.launcher is not None:
        end_with_launcher(chosen.launcher)
    let_children_import_from(child_site.FOLDER)
    run = run_module if chosen.module else run_script
    run(chosen.script, chosen.arguments)


def _launch(chosen: argparse.Namespace, processes: int) -> int:
    """Start the processes of this machine and wait for them; returns the exit status."""
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as elastic_run

    words = [
        "--nproc_per_node", str(processes), "--nnodes", str(chosen.nodes), "--max_restarts", str(chosen.restarts),
        *_rendezvous(chosen), "-m", "hf_compat", "run", "--launcher", str(os.getpid()),
        *(["--compat", chosen.compat] if chosen.compat else []), *(["-m"] if chosen.module else []),
        chosen.script, *chosen.arguments,
    ]  # fmt: skip
    launched = get_args_parser().parse_args(words)
    return supervised(lambda: elastic_run(launched))  # type: ignore[no-untyped-call]  # torch's


def supervised(launch: Callable[[], object]) -> int:
    """Run torch's launcher to its end; say which rank has failed, and return the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _say(f"Rank {rank} has failed with status {failure.exitcode}; all processes are ended.")
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as stopped:
        _say(f"{stopped.sigval.name} has ended all processes.")
        return 128 + stopped.sigval
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - the command's answer


def _rendezvous(chosen: argparse.Namespace) -> list[str]:
    """Return the words that tell torch's launcher where the processes meet."""
    if chosen.nodes == 1 and chosen.main_port is None:
        return ["--standalone"]
    port = chosen.main_port or 29500
    return ["--node_rank", str(chosen.node_rank), "--master_addr", chosen.main_address, "--master_port", str(port)]
