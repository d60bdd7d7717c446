"""Two trainings want one folder and are killed at random: nothing that was saved is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from autopar.runtime.training.folder_lock import LOCK
from autopar.runtime.training.latest import find_checkpoint
from autopar.runtime.training.manifest import checkpoints_in, read_manifest
from autopar.training.metrics import METRICS

KILLS = 20
STEPS = 240
PATIENCE = 240.0
OWN = """
import time

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x, y):
        return (self.down(self.up(x).tanh()) - y).square().mean()

class Slow:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.arange(4) / (index + 1), torch.ones(4)

def net():
    return Net(), (torch.zeros(4, 4), torch.zeros(4, 4))

def data():
    return Slow()
"""
FILE = f"""
[model]
callable = "own:net"
[data]
callable = "own:data"
batch = 4
[optimizer]
lr = 0.01
clip = 1.0
[schedule]
name = "cosine"
[training]
folder = "run"
steps = {STEPS}
save_every = 3
keep = 1000
log_every = 1
ranks = 2
[plan]
scheme = "zero1"
"""


class Program:
    """One `autopar train`, which is started again whenever it has ended."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.told = folder / f"{name}.txt"
        self.lives: list[str] = []
        self.start()

    def start(self) -> None:
        """Begin a life."""
        with self.told.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autopar", "train", "train.toml", *self.options],
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def tree(self) -> list[int]:
        """The processes of this life: the launcher and its ranks."""
        try:
            launcher = psutil.Process(self.process.pid)
            return [launcher.pid, *(child.pid for child in launcher.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def end(self) -> int:
        """Wait for the end of this life; the exit code."""
        code = self.process.wait(PATIENCE)
        self.lives.append(self.told.read_text(encoding="utf-8"))
        return code


def _holders(folder: Path) -> list[int]:
    """Processes that have locked a folder, as the system tells."""
    lock = folder / LOCK
    if not lock.exists():
        return []
    inode = str(lock.stat().st_ino)
    lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    fields = [line.split() for line in lines if "->" not in line]
    return [int(one[4]) for one in fields if one[5].rpartition(":")[2] == inode]


def _require_good(folder: Path, before: list[str]) -> list[str]:
    """Every checkpoint that was whole is there and whole, and the latest is the last."""
    names = checkpoints_in(folder)
    assert names[: len(before)] == before
    for name in names[-2:]:
        read_manifest(folder / name)
    latest = find_checkpoint(folder)
    # Between the rename of a checkpoint and that of `latest` it is the one before.
    assert (latest is None and len(names) <= 1) or (latest and latest.name in names[-2:])
    return names


def _going_on(programs: list[Program], until: Callable[[], bool], seconds: float = PATIENCE) -> int:
    """Start programs again that end, until something is so; how often the lock refused one."""
    refused = 0
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        refused += sum(_revived(program) for program in programs)
        time.sleep(0.05)
    return refused


def _has_more(folder: Path, count: int) -> bool:
    return len(checkpoints_in(folder)) > count


def _revived(program: Program) -> bool:
    """Start a program again that has ended; whether it was refused because of the lock."""
    if program.process.poll() is None:
        return False
    code = program.end()
    said = program.lives[-1]
    program.start()
    refused = "trains into this folder" in said
    assert not refused or code != 0, said
    return refused


def _killed(program: Program, draw: random.Random) -> None:
    """Kill the launcher or a rank."""
    victims = program.tree()
    if victims:
        os.kill(draw.choice(victims), signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the file of a training, whose data are slow."""
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "train.toml").write_text(FILE, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="locks are read from /proc")
def test_two_trainings_of_one_folder_that_are_killed(place: Path) -> None:
    """Losses and weights at the end are those of an undisturbed training, bit for bit."""
    draw = random.Random(0)
    run = place / "run"
    programs = [Program(place, name) for name in ("first", "second")]
    names: list[str] = []
    refused = 0
    try:
        for kill in range(KILLS):
            if kill % 2:
                refused += _going_on(programs, partial(_has_more, run, len(names)))
                assert _has_more(run, len(names)), "no training goes on"
            refused += _going_on(programs, lambda: False, draw.uniform(0, 1.5))
            assert len(_holders(run)) <= 1
            _killed(draw.choice(programs), draw)
            names = _require_good(run, names)
        codes = _to_the_end(programs)
    finally:
        for program in programs:
            for process in program.tree():
                os.kill(process, signal.SIGKILL)
    assert refused > 0 and 0 in codes, codes
    _require_good(run, names)
    alone = Program(place, "alone", "--folder", "whole")
    assert alone.end() == 0, alone.lives
    _require_same(run, place / "whole")


def _to_the_end(programs: list[Program]) -> list[int]:
    """The exit codes of both; one that is refused is started again until the other is through."""
    codes = []
    for program in programs:
        code = program.end()
        end = time.monotonic() + PATIENCE
        while code != 0 and time.monotonic() < end:
            said = program.lives[-1]
            assert code < 0 or "trains into this folder" in said or "SIGKILL" in said, said
            program.start()
            code = program.end()
        codes.append(code)
    return codes


def _require_same(first: Path, second: Path) -> None:
    """Two trainings made the same steps and have the same last checkpoint."""
    told = [
        [json.loads(line) for line in (one / METRICS).read_text(encoding="utf-8").splitlines()]
        for one in (first, second)
    ]
    assert [line["step"] for line in told[0]] == list(range(1, STEPS + 1))
    for name in ("step", "loss", "lr", "gradient_norm"):
        assert [line[name] for line in told[0]] == [line[name] for line in told[1]], name
    one, other = (find_checkpoint(folder) for folder in (first, second))
    assert one is not None and other is not None and one.name == other.name
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        mine = load_file(one / file)
        theirs = load_file(other / file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
