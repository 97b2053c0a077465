"""`hf-compat run script.py ARGS…` runs an HF script, unchanged, on Lightning's engine, in one process for each GPU.

Torch's elastic launcher starts several processes, as in Lightning's `fabric run`. It ends all of them when one fails,
and may start them again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_compat.errors import ArgumentError, HfCompatError
from hf_compat.hf.argument_values import NEWEST
from hf_compat.hf.arguments_rules import PROFILES, VARIABLE, followed
from hf_compat.interop import child_site, patching
from hf_compat.interop.user_script import require_script, run_module, run_script
from hf_compat.runtime.console import has_children, saying_what_is_awaited
from hf_compat.runtime.launch import (
    end_with_launcher,
    environment,
    find_place,
    is_launched,
    let_children_import_from,
    read_launch,
)
from hf_compat.runtime.paths import local_path
from hf_compat.runtime.text import brief, parse_switch, shown


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat run",
        description="Run an HF script, unchanged, on Lightning's engine. Exit status: that of the script, 2 if it "
        "could not be started, 128 and the number of the signal that has ended it.",
    )
    parser.add_argument(
        "--devices",
        help="processes on this machine: a number, or auto (one for each visible GPU), which is the default",
    )
    parser.add_argument(
        "--nodes",
        type=machines_of,
        help="machines, or 1:4 for one to four (default: as the launcher says)",
    )
    parser.add_argument("--node-rank", type=int, help="rank of this machine (default: as the launcher says, or 0)")
    parser.add_argument("--main-address", help="host, or host:port, of the first machine (default: as above)")
    parser.add_argument("--main-port", type=int, help="port there (a free one on a single machine)")
    parser.add_argument("--restarts", type=int, default=0, help="times that a failed run is started again")
    parser.add_argument("--log-dir", help="a folder for each rank's output (shown lines begin with the rank)")
    parser.add_argument(
        "--compat",
        choices=tuple(PROFILES),
        help="generation of transformers whose defaults apply (default: that of the installed release)",
    )
    parser.add_argument("--launcher", type=int, default=None, help=argparse.SUPPRESS)  # process id, for a rank
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in `python -m`")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command, and give its exit status. Errors of the script are raised."""
    chosen = make_parser().parse_args(list(words))
    try:
        if not chosen.module:
            require_script(chosen.script, "hf-compat run [options] SCRIPT [arguments]")
        machines = _machines(chosen)
        processes = processes_of(chosen, machines)
        if machines.most > 1 or processes > 1:
            return _launch(chosen, machines, processes)
        if chosen.compat is not None:
            environment[VARIABLE] = chosen.compat
        patching.patch()
        tell_defaults()
    except HfCompatError as error:
        _say(str(error))
        return 2
    run_here(chosen)
    return 0


class Machines(NamedTuple):
    """The machines of a run, including this one."""

    least: int = 1
    most: int = 1  # if more than `least`, machines may leave and join
    rank: int = 0  # of this machine. It is ignored if machines may leave and join
    address: str = "127.0.0.1"  # of the first machine
    port: int | None = None  # None takes a free one


def machines_of(text: str) -> tuple[int, int]:
    """Read `--nodes`, which is a number, or the fewest and the most as in `1:4`."""
    least, _, most = text.partition(":")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise argparse.ArgumentTypeError(f"{brief(text)} is not a number of machines, such as 2 or 1:4")
    return int(least), int(most or least)


def _machines(chosen: argparse.Namespace) -> Machines:
    """Find the machines from the options, or from a launcher that starts one process per machine."""
    place = find_place()
    if place is not None and not place.is_machine:
        launched, asked = place.world_size or 1, chosen.nodes is not None and chosen.nodes[1] > 1
        if launched > 1 and (asked or (chosen.devices is not None and number_of(chosen.devices) > 1)):
            raise ArgumentError(
                f"A launcher has started {launched} processes already, and `--devices`, `--nodes` ask for more.\n\n"
                "Hint: leave them out, or let the launcher start one process on each machine."
            )
        place = None
    elif place is not None and not place.launcher.starts_machines and chosen.nodes is None and chosen.devices is None:
        return Machines()  # one of the processes that train
    said = None if place is None else place.world_size
    asked_nodes: tuple[int, int] | None = chosen.nodes
    wanted = asked_nodes or (said or 1, said or 1)
    if place is not None and said is not None and not wanted[0] <= said <= wanted[1]:
        raise ArgumentError(
            f"`--nodes {':'.join(map(str, dict.fromkeys(wanted)))}`, and {place.launcher.name} has started {said} "
            "process(es), one for each machine.\n\nHint: leave `--nodes` out. The launcher gives the number."
        )
    address, port = None if place is None else place.address, chosen.main_port
    if port is None and place is not None and chosen.main_address is None:
        port = place.port
    if chosen.main_address is not None:
        address, given_port = address_of(chosen.main_address)
        if port is not None and given_port not in (None, port):
            raise ArgumentError(f"`--main-address {chosen.main_address}` and `--main-port {port}` differ.")
        port = given_port or port
    if address is None and wanted[1] > 1:
        raise ArgumentError(
            "`--main-address` is not set, and nothing says where the first of several machines is.\n\n"
            "Hint: give its host name on every machine, or `host:port` if port 29500 is taken."
        )
    rank = chosen.node_rank if chosen.node_rank is not None else place.rank if place is not None else 0
    if not 0 <= rank < wanted[1]:
        raise ArgumentError(f"`--node-rank {rank}` is not one of {wanted[1]} machines.\n\nHint: count them from 0.")
    return Machines(*wanted, rank, address or "127.0.0.1", port)


def address_of(text: str) -> tuple[str, int | None]:
    """Read `--main-address`, which is a host or host:port. An IPv6 address with a port has brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.count(":") > 1 and not host.endswith("]")):
        return text.strip("[]"), None
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise ArgumentError(f"`--main-address {text}` has the port {brief(port)}.\n\nHint: host, or host:29500.")
    return host.strip("[]"), int(port)


def processes_of(chosen: argparse.Namespace, machines: Machines) -> int:
    """Count the processes to start. By default a process without a launcher starts one on each GPU."""
    if chosen.devices is not None:
        return number_of(chosen.devices)
    is_on_cpu = parse_switch(environment, "ACCELERATE_USE_CPU") or _ON_CPU.intersection(chosen.arguments)
    if (is_launched() and machines.most == 1) or is_on_cpu:
        return 1
    processes = number_of("auto")
    if processes > 1:
        _say(f"hf-compat run: {processes} GPUs, one process each (`--devices 1` for one of them)")
    return processes


# Arguments of a script that trains on the CPU.
_ON_CPU = frozenset({"--use_cpu", "--use_cpu=true", "--use_cpu=True", "--no_cuda", "--no_cuda=true", "--no_cuda=True"})


def tell_defaults() -> None:
    """Print the defaults that apply if those of the installed release differ from today's."""
    replaced = followed()
    if replaced is None or not replaced.defaults or read_launch().process_index > 0:
        return
    if (environment.get(VARIABLE) or replaced.generation) != replaced.generation:  # by `--compat` or the environment
        return
    defaults = ", ".join(shown(name, value) for name, value in replaced.defaults.items())
    today = f"; `--compat {NEWEST}` has today's" if replaced.generation != NEWEST else ""
    _say(f"hf-compat run: transformers {replaced.release} is installed, and its defaults count ({defaults}){today}.")


def number_of(devices: str) -> int:
    """Read `--devices`."""
    if devices == "auto":
        return max(torch.cuda.device_count(), 1)
    if not devices.isdigit() or int(devices) < 1:
        raise ArgumentError(
            f"`--devices {devices}` is not a number of processes.\n\nHint: use a number such as 2, or auto."
        )
    return int(devices)


def run_here(chosen: argparse.Namespace) -> None:
    """Run a script in this process, with transformers patched. Python processes that it starts patch theirs."""
    if chosen.launcher is not None:
        end_with_launcher(chosen.launcher)
    let_children_import_from(child_site.FOLDER)
    run = run_module if chosen.module else run_script
    run(chosen.script, chosen.arguments)


def _launch(chosen: argparse.Namespace, machines: Machines, processes: int) -> int:
    """Start the processes of this machine, wait for them, and give the exit status."""
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as elastic_run

    shown_by_rank = []
    if chosen.log_dir is not None:
        environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}]: "
        shown_by_rank = ["--log_dir", local_path("--log-dir", chosen.log_dir), "--tee", "3"]
    port = machines.port or 29500  # torchrun's
    if machines.most == 1 and machines.port is None:
        meeting = ["--standalone"]
    elif machines.least < machines.most:  # torch numbers machines that leave and join
        # torch would keep the address of the store across rounds, though another machine may have become the first
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{machines.address}:{port}", "--rdzv_id", "hf_compat"]
    else:
        meeting = ["--node_rank", str(machines.rank), "--master_addr", machines.address, "--master_port", str(port)]
    words = [
        "--nproc_per_node", str(processes), "--nnodes", f"{machines.least}:{machines.most}", "--max_restarts",
        str(chosen.restarts), *meeting, *shown_by_rank, "-m", "hf_compat", "run", "--launcher",
        str(os.getpid()), *(["--compat", chosen.compat] if chosen.compat else []), *(["-m"] if chosen.module else []),
        chosen.script, *chosen.arguments,
    ]  # fmt: skip
    launched = get_args_parser().parse_args(words)
    others = f"the other machines, of {machines.least} at least; this is machine {machines.rank} and asks"
    where = f"at {machines.address}:{port} (`--main-address`)"
    told = f"hf-compat run: waiting for {others} {where}"
    with saying_what_is_awaited(told, machines.address, until=has_children):
        return supervised(lambda: elastic_run(launched))  # type: ignore[no-untyped-call]  # torch's


def supervised(launch: Callable[[], object]) -> int:
    """Run torch's launcher to its end. Print the rank that has failed, and give the exit status."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        launch()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _say(f"Rank {rank} has failed with status {failure.exitcode}; all processes are ended.")
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as stopped:
        _say(f"{stopped.sigval.name} has ended all processes.")
        return 128 + stopped.sigval
    except (RendezvousError, DistError) as lost:
        _say(
            f"The machines do not find each other: {lost}\n\nHint: they meet at `--main-address`. If that machine was "
            "lost, start the command again on all of them."
        )
        return 1
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - the command's answer
