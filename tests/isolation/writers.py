"""Every way to change a file that a script may take: `python writers.py`, in a folder that `prepare` has filled.

Each row is called in a folder of its name that holds `file`, and changes or removes it; it prints how that went.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

MINE = b"mine"
BESIDE = "beside"  # a folder next to the one that the writers work in
# What a file holds before, where it is not MINE.
CONTENTS = {"sqlite3": b""}
LINKED = ("a link out of the folder",)
TWICE = ("a hard link of the user's",)


def prepare(folder: Path) -> None:
    """Make the files that the writers change."""
    for name in WRITERS:
        place = folder / name
        place.mkdir(parents=True)
        file = place / "file"
        if name in LINKED:
            file = folder.parent / BESIDE / name
            file.parent.mkdir(exist_ok=True)
            (place / "file").symlink_to(Path("..", "..", BESIDE, name))
        file.write_bytes(CONTENTS.get(name, MINE))
        if name in TWICE:
            os.link(file, place / "other name")


def folder_descriptor():
    return os.open(".", os.O_RDONLY)


def by_sqlite():
    with sqlite3.connect("file") as base:
        base.execute("create table t (a)")


def by_tokenizers():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save("file")


def by_pyarrow():
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), "file")


def by_pandas():
    import pandas

    pandas.DataFrame({"a": [1]}).to_parquet("file")


def by_datasets():
    import datasets

    datasets.Dataset.from_dict({"a": [1]}).to_parquet("file")


def by_jit():
    import torch

    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), "file")


def by_export():
    import torch

    torch.export.save(torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1),)), "file.pt2")
    os.replace("file.pt2", "file")


def by_shared_tensor():
    import torch

    torch.from_file("file", shared=True, size=4, dtype=torch.uint8)[0] = 7


def by_torch_save():
    import torch

    torch.save({"a": torch.ones(1)}, "file")


def by_safetensors():
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, "file")


def by_numpy():
    import numpy

    numpy.memmap("file", mode="r+", dtype="uint8")[0] = 7


def by_mmap():
    with open("file", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0] = 7


def by_mode():
    opened = os.open("file", os.O_RDONLY)
    os.fchmod(opened, 0o600)
    os.close(opened)


def by_c():
    libc = ctypes.CDLL(None)
    opened = libc.open(b"file", os.O_WRONLY)
    assert libc.write(opened, b"more", 4) == 4
    libc.close(opened)


def by_spawn():
    child = multiprocessing.get_context("spawn").Process(target=os.truncate, args=(os.path.abspath("file"), 1))
    child.start()
    child.join()
    assert child.exitcode == 0


def by_fork():
    child = multiprocessing.get_context("fork").Process(target=os.truncate, args=("file", 1))
    child.start()
    child.join()
    assert child.exitcode == 0


def by_moving():
    Path("new").write_text("new")
    shutil.move("new", "file")


def by_linking():
    os.link("file", "new")
    Path("new").write_text("changed")
    os.unlink("new")


def by_loader():
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            Path(f"row-{index}").write_text("new")
            if index == 1:
                Path("file").write_text("changed")
            return index

    assert len(list(torch.utils.data.DataLoader(Rows(), batch_size=1, num_workers=2))) == 2


def by_appending():
    with open("file", "a") as file:
        file.write("more")


def by_sed():
    subprocess.run(["sed", "-i", "s/mine/changed/", "file"], check=True)


WRITERS = {
    "sqlite3": by_sqlite,
    "tokenizers": by_tokenizers,
    "pyarrow": by_pyarrow,
    "pandas": by_pandas,
    "datasets": by_datasets,
    "torch.jit": by_jit,
    "torch.export": by_export,
    "torch.from_file": by_shared_tensor,
    "torch.save": by_torch_save,
    "safetensors": by_safetensors,
    "numpy.memmap": by_numpy,
    "mmap": by_mmap,
    "open": lambda: Path("file").write_text("changed"),
    "append": by_appending,
    "unlink": lambda: os.unlink("file"),
    "unlink, dir_fd": lambda: os.unlink("file", dir_fd=folder_descriptor()),
    "rename, dir_fd": lambda: os.rename("file", "new", src_dir_fd=folder_descriptor()),
    "fchmod": by_mode,
    "chown": lambda: os.chown("file", 12, 13),
    "setxattr": lambda: os.setxattr("file", "user.note", b"changed"),
    "utime": lambda: os.utime("file", (1, 1)),
    "truncate": lambda: os.truncate("file", 1),
    "the C library": by_c,
    "spawn": by_spawn,
    "fork": by_fork,
    "shutil.move": by_moving,
    "os.link": by_linking,
    "a loader's workers": by_loader,
    "sed": by_sed,
    "a shell": lambda: subprocess.run("echo more >> file", shell=True, check=True),
    "rmtree": lambda: shutil.rmtree("../rmtree"),
    "a hard link of the user's": lambda: Path("other name").write_text("changed"),
}
# Ways to leave the folder, which copies refuse.
OUTWARD = {
    "a link out of the folder": lambda: Path("file").write_text("changed"),
    "a whole path": lambda: Path(sys.argv[1], "a whole path", "file").write_text("changed"),
    "a path upwards": lambda: Path("..", "..", BESIDE, "more").write_text("changed"),
}
WRITERS |= OUTWARD


if __name__ == "__main__":
    home = os.getcwd()
    for name, write in WRITERS.items():
        os.chdir(name)
        try:
            write()
            told = ""
        except OSError as error:
            told = str(error)
        print(json.dumps({"name": name, "error": told}), flush=True)
        os.chdir(home)
