"""What two processes tell each other, against Accelerate's functions, in one start of two processes."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing
from torch import distributed

from hf_compat.errors import ProcessError
from hf_compat.runtime import collectives
from hf_compat.runtime import collectives as process_exit


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def talk(rank: int, store: str) -> None:
    process_exit.leave_at_exit()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data = {"pair": Pair(torch.tensor([rank, rank]), torch.tensor(rank)), "name": "x"}
    gathered = collectives.gather(data)
    assert type(gathered["pair"]) is Pair and gathered["name"] == "x"
    assert gathered["pair"].left.tolist() == [0, 0, 1, 1] and gathered["pair"].right.tolist() == [0, 1]
    padded = collectives.pad_across(Pair(torch.ones(1, 2 + rank), torch.ones(1)), dim=1, pad_index=-100)
    assert padded.left.tolist() == [[1, 1, -100]] if rank == 0 else padded.left.tolist() == [[1, 1, 1]]
    assert collectives.reduce(Pair(torch.tensor(1.0), torch.tensor(rank)), "mean").right == 0.5
    assert collectives.gather_objects(rank) == [0, 1] and collectives.broadcast_object(rank) == 0
    assert collectives.highest_each([rank], 60.0) == [1]
    with pytest.raises(OSError if rank == 1 else ProcessError, match="disk full"), collectives.failing_together():
        if rank == 1:
            raise OSError("disk full")
    distributed.barrier()  # nobody leaves while another still reads
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_two_processes_agree(tmp_path):
    torch.multiprocessing.spawn(talk, args=(str(tmp_path / "store"),), nprocs=2)


def test_one_process_gets_its_own_back():
    data = Pair(torch.ones(2), torch.tensor(1))
    assert collectives.gather(data) is data and collectives.pad_across(data) is data
    assert collectives.reduce(data, scale=2.0).left.tolist() == [2, 2]
    with pytest.raises(KeyError), collectives.failing_together():
        raise KeyError("mine")


SCRIPT = """
import datetime, os, socket, sys, threading, types
from hf_compat.runtime import collectives
holder = socket.socket()
holder.bind(("127.0.0.1", 0))
holder.listen()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(holder.getsockname()[1]), RANK="0", WORLD_SIZE="1")
collectives.PORT_WAIT_SECONDS = float(sys.argv[1])
threading.Timer(1.5, holder.close).start()
args = types.SimpleNamespace(process_index=0, world_size=1)
print("met", collectives._rendezvous_store(args, datetime.timedelta(seconds=30)) is not None)
"""


@pytest.mark.parametrize(("waits", "meets"), [(30, True), (0, False)])
def test_a_port_that_the_last_job_still_holds_is_waited_for(waits, meets):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(waits)], capture_output=True, text=True, timeout=120)
    assert ("met True" in done.stdout) == meets, done.stderr[-1500:]
    assert meets or "EADDRINUSE" in done.stderr
