"""SIGTERM in a training: every rank ends the step, saves, and exits with 0; what comes too late
does not pretend to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.runtime.launch import run_ranks
from autopar.runtime.training.latest import latest_in
from autopar.runtime.training.saving import save
from autopar.runtime.training.stopping import TOO_LATE, steps
from tests.runtime.training.nets import built, plan_of, train


def _stopped(folder: str) -> None:
    """Rank 1 alone hears the signal, in the third step."""
    module, optimizer = built("zero3", 2)
    for step in steps(0, 10, lambda done: save(module, optimizer, folder, step=done)):
        train(module, optimizer, range(step, step + 1))
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the training was to end")


def test_all_ranks_save_and_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan_of("zero3", 2)
    assert run_ranks(_stopped, 2, str(tmp_path)) == [None, None]
    assert latest_in(tmp_path) == "step-00000003"
    assert "autopar: SIGTERM: saved after 3 steps, and ended" in capfd.readouterr().err


SCRIPT = """
import sys, time
from autopar.runtime.training.stopping import steps
for step in steps(0, 1000, lambda done: time.sleep({save})or print("saved", done), grace=0.5):
    print("step", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.0, 0), (5.0, TOO_LATE)])
def test_one_process(tmp_path: Path, seconds: float, code: int) -> None:
    command = [sys.executable, "-c", SCRIPT.format(save=seconds)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "step\n"
        time.sleep(0.1)
        program.send_signal(signal.SIGTERM)
        out, errors = program.communicate(timeout=30)
    assert program.returncode == code
    assert ("saved" in out) == (code == 0) and ("nothing was saved within 0.5 s" in errors) == (
        code != 0
    )


def test_steps_run_to_their_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert (
        list(steps(3, 6, lambda done: None)) == [3, 4, 5]
        and signal.getsignal(signal.SIGTERM) is before
    )


SLOW = (pytest.mark.slow, pytest.mark.ci)
LAUNCHER = """
import sys, time
import torch
from autopar.runtime.launch import local_ranks, run_ranks
from autopar.runtime.training.stopping import steps
import work
if {clean}:
    local_ranks.can_fork = lambda: False
print("results", run_ranks(work.{work}, 2, sys.argv[1]))
"""
WORK = """
import os, time
from pathlib import Path
import torch.distributed as dist
from autopar.runtime.training.stopping import steps

def saves(folder):
    own = Path(folder) / str(dist.get_rank())
    for step in steps(0, 1000, lambda done: own.write_text(f"saved {done}")):
        own.write_text("going")
        dist.barrier()
        time.sleep(0.05)

def hears_nothing(folder):
    (Path(folder) / str(dist.get_rank())).write_text("going")
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("work", "clean", "code", "said"),
    [
        ("saves", False, 0, "autopar: SIGTERM: saved after"),
        pytest.param("saves", True, 0, "autopar: SIGTERM: saved after", marks=SLOW),
        ("hears_nothing", False, -signal.SIGTERM, "was killed by SIGTERM before it was done"),
        pytest.param(
            "hears_nothing",
            True,
            -signal.SIGTERM,
            "was killed by SIGTERM before it was done",
            marks=SLOW,
        ),
    ],
)
def test_the_launcher_hands_the_signal_on(
    tmp_path: Path, work: str, clean: bool, code: int, said: str
) -> None:
    """SIGTERM to the process that forked the ranks, or has another fork them: they save, and it
    ends with 0.
    """
    (tmp_path / "work.py").write_text(WORK, encoding="utf-8")
    (tmp_path / "launcher.py").write_text(LAUNCHER.format(work=work, clean=clean), encoding="utf-8")
    (tmp_path / "out").mkdir()
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        end = time.monotonic() + 60
        while len(list((tmp_path / "out").iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        out, errors = program.communicate(timeout=60)
    assert program.returncode == code and said in errors and "results" not in out, errors
    assert all(path.read_text().startswith("saved") for path in (tmp_path / "out").iterdir()) == (
        code == 0
    )
