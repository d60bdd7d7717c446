"""Ranks of `torchrun` that are killed, stopped, left alone or asked to end: the training goes on
unharmed, or ends in words.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.processes import alive
from tests.runtime.training.nets import plan_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ci,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
SCRIPT = Path(__file__).with_name("loop_script.py")


def _start(folder: Path, disturbance: str, *options: str) -> subprocess.Popen[str]:
    folder.mkdir()
    plan_of("zero3", 2).save(folder / "plan.json")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *options,
    ]
    command += [str(SCRIPT), str(folder), str(folder / "plan.json"), disturbance]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def _log(folder: Path) -> dict[int, list[Any]]:
    """The last line on every step: loss and batch."""
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    return {step: rest for step, *rest in map(json.loads, lines)}


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _ranks(folder: Path) -> list[int]:
    return [int(path.read_text(encoding="utf-8") or 0) for path in folder.glob("pid*")]


def test_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    """From the latest checkpoint, with every step's loss and samples those of the undisturbed run,
    bit for bit.
    """
    logs = []
    for name, disturbance, restarts in (("alone", "none", "0"), ("killed", "SIGKILL", "1")):
        with _start(tmp_path / name, disturbance, "--max-restarts", restarts) as program:
            out, _ = program.communicate(timeout=300)
        assert program.returncode == 0, out
        logs.append(_log(tmp_path / name))
    assert logs[0] == logs[1] and sorted(logs[0]) == list(range(8))
    assert (
        len((tmp_path / "killed" / "log").read_text(encoding="utf-8").splitlines()) == 9
    )  # step 4 was made twice
    assert not any(map(alive, _ranks(tmp_path / "killed")))
    assert [path.name for path in (tmp_path / "killed" / "saved").glob(".*")] == []


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with _start(tmp_path / "run", "SIGSTOP") as program:
        out, _ = program.communicate(timeout=300)
    assert (
        program.returncode != 0
        and "autopar: rank 1 has not been heard of for 3 s, and rank 0 waits for it in step 5"
        in out
    ), out
    assert time.monotonic() - began < 120 and not any(map(alive, _ranks(tmp_path / "run")))


def test_sigterm_saves_and_ends(tmp_path: Path) -> None:
    with _start(tmp_path / "run", "SIGTERM") as program:
        out, _ = program.communicate(timeout=300)
    assert program.returncode == 0 and "autopar: SIGTERM: saved after 6 steps, and ended" in out, (
        out
    )
    latest = (tmp_path / "run" / "saved" / "latest").read_text(encoding="utf-8")
    # Beside that of the loop's own.
    assert latest.split()[0] == "step-00000006.1"


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    with _start(tmp_path / "run", "SIGSTOP") as program:
        assert _until(
            lambda: (tmp_path / "run" / "disturbed").exists() or program.poll() is not None
        )
        # On a busy machine the other rank writes its file later.
        assert _until(lambda: len(running := _ranks(tmp_path / "run")) == 2 and all(running))
        ranks = _ranks(tmp_path / "run")
        assert len(ranks) == 2 and all(map(alive, ranks))
        program.send_signal(signal.SIGKILL)
        assert _until(lambda: not any(map(alive, ranks)), 5.0)
