"""A training in a process of its own, which forks the ranks, disturbed at a random moment.

Its losses must not change.

Expected after every fault: all ranks end, with one message that names the cause; the next life
continues from the latest whole checkpoint, or from the one that the refusal names; in the end each
step's loss and samples are those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.errors import AutoparError
from autopar.runtime.launch import forked_ranks, run_ranks
from autopar.runtime.training.latest import latest_in
from autopar.runtime.training.manifest import UNFINISHED

from .trainings import Life, curve, live, plan_of

SILENCE = 5.0
"""Seconds without a sign of life after which a stopped rank is given up, in place of a minute."""
PATIENCE = 90.0
STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One disturbed training.

    Fault, plan, error found (empty: none) and the seconds until the ranks ended.
    """

    fault: str
    scheme: str
    ranks: int
    wrong: str
    seconds: float


class Process:
    """A life in a process of its own, whose ranks are its children; `said`: its last words."""

    def __init__(self, life: Life, *, silence: float = forked_ranks.SILENCE) -> None:
        self.life = life
        self.folder = Path(life.folder)
        self.silence = silence
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (*self.folder.glob("pid*"), *self.folder.glob("said")):
            path.unlink()
        self.before = self._lines()
        plan_of(life.model, life.scheme, life.ranks)  # made before the fork, so that lives need not
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run()

    def _run(self) -> None:
        code = 1
        said = ""
        forked_ranks.SILENCE = self.silence
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        try:
            run_ranks(live, self.life.ranks, self.life, timeout=300.0)
            code = 0
        except AutoparError as error:
            said = str(error)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            (self.folder / "said").write_text(said, encoding="utf-8")
            os._exit(code)

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """The exit code; None where it does not end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return None

    @property
    def said(self) -> str:
        """The message that it ended with."""
        path = self.folder / "said"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def pids(self) -> list[int]:
        """The ranks that have begun."""
        return [
            int(path.read_text(encoding="utf-8") or 0) for path in sorted(self.folder.glob("pid*"))
        ]

    def _lines(self) -> int:
        path = self.folder / "log"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def made(self, steps: int) -> bool:
        """Wait until this life has made `steps` steps; whether it has."""
        end = time.monotonic() + PATIENCE
        while self._lines() < self.before + steps:
            if time.monotonic() > end or not alive(self.pid):
                return False
            time.sleep(0.001)
        return True

    def reached(self, step: int, seconds: float = PATIENCE) -> bool:
        """Whether the step was made, waiting for it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            made = curve(self.folder) if (self.folder / "log").exists() else {}
            if len(self.pids) == self.life.ranks and (step < 0 or step in made):
                return True
            if not alive(self.pid):
                return False
            time.sleep(0.01)
        return False


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
            != "Z"
        )
    except OSError:
        return False


def ended(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether all of them end, soon."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


@functools.cache
def undisturbed(
    model: str, scheme: str, ranks: int, steps: int
) -> dict[int, tuple[float, list[int]]]:
    """The losses and samples of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        process = Process(Life(model=model, scheme=scheme, ranks=ranks, folder=folder, steps=steps))
        code = process.wait(20 * PATIENCE)
        assert code == 0, process.said
        return curve(Path(folder))


class Disturbed:
    """A training that is disturbed, life after life."""

    def __init__(self, scheme: str, ranks: int, folder: Path, chance: random.Random) -> None:
        self.life = Life(model="dense", scheme=scheme, ranks=ranks, folder=str(folder), steps=STEPS)
        self.folder = folder
        self.chance = chance
        self.seconds = 0.0

    def signalled(self, number: signal.Signals, after: int, *, launcher: bool = False) -> str:
        """A life ended by a signal some time after a step; the error found, or nothing.

        The signal goes to a random rank, or to the process that forked the ranks (`launcher`).
        """
        process = Process(
            self.life, silence=SILENCE if number == signal.SIGSTOP else forked_ranks.SILENCE
        )
        if not process.reached(after):
            return f"step {after} was not reached: {process.said}"
        time.sleep(self.chance.random() * 0.1)
        pids = process.pids
        began = time.monotonic()
        rank = self.chance.randrange(len(pids))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid if launcher else pids[rank], number)
        code = process.wait()
        self.seconds = max(self.seconds, time.monotonic() - began)
        if not ended(pids):
            return "ranks were left behind"
        if number == signal.SIGTERM:
            return "" if code == 0 else f"SIGTERM ended in {code}: {process.said}"
        if code == 0:  # it came when everything was done
            return ""
        named = re.search(rf"ranks? [\d, ]*\b{rank}\b.* in step \d+", process.said)
        if launcher or named:
            return ""
        return f"the message does not name rank {rank} and its step: {process.said[:200]}"

    def finished(self, name: str | None = None) -> str:
        """Run the last life to the end; the error in it, or in its files."""
        process = Process(replace(self.life, name=name))
        if (code := process.wait()) != 0:
            return f"the last life ended in {code}: {process.said}"
        wanted = undisturbed(self.life.model, self.life.scheme, self.life.ranks, STEPS)
        losses = curve(self.folder)
        if differing := [step for step in wanted if losses.get(step) != wanted[step]]:
            return f"steps {differing} are not those of the undisturbed run"
        left = [
            path.name for path in (self.folder / "saved").iterdir() if path.name.startswith(".")
        ]
        return f"left behind: {left}" if left else ""


def kill(run: Disturbed) -> str:
    """A rank is killed."""
    return run.signalled(signal.SIGKILL, run.chance.randrange(-1, STEPS - 2)) or run.finished()


def stop(run: Disturbed) -> str:
    """A rank is stopped."""
    return run.signalled(signal.SIGSTOP, run.chance.randrange(0, STEPS - 3)) or run.finished()


def launcher(run: Disturbed) -> str:
    """The process that forked the ranks is killed."""
    return (
        run.signalled(signal.SIGKILL, run.chance.randrange(-1, STEPS - 2), launcher=True)
        or run.finished()
    )


def terminate(run: Disturbed) -> str:
    """The process that forked the ranks is asked to end."""
    return (
        run.signalled(signal.SIGTERM, run.chance.randrange(0, STEPS - 3), launcher=True)
        or run.finished()
    )


def twice(run: Disturbed) -> str:
    """A rank is killed, and one of the next life."""
    first = run.signalled(signal.SIGKILL, run.chance.randrange(0, STEPS - 4))
    return first or run.signalled(signal.SIGKILL, -1) or run.finished()


def full_disk(run: Disturbed) -> str:
    """The disk of rank 0 is full when a checkpoint is saved."""
    process = Process(replace(run.life, full_at=2 * run.life.save_every))
    code = process.wait()
    pids = process.pids
    if code == 0 or "cannot be saved" not in process.said or not ended(pids):
        return f"a full disk ended in {code}: {process.said[:200]}"
    left = list((run.folder / "saved").glob(UNFINISHED + "*"))
    return f"left behind: {left}" if left else run.finished()


def damage(run: Disturbed) -> str:
    """A rank is killed, and a file of the latest checkpoint is flipped, cut or lost."""
    if wrong := run.signalled(signal.SIGKILL, 2 * run.life.save_every):
        return wrong
    latest = latest_in(run.folder / "saved")
    assert latest is not None
    path = run.chance.choice(sorted((run.folder / "saved" / latest).glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    data[-1 - run.chance.randrange(min(len(data), 400))] ^= 1
    run.chance.choice(
        (path.unlink, lambda: path.write_bytes(data), lambda: path.write_bytes(data[:-9]))
    )()
    process = Process(run.life)
    code = process.wait()
    before = re.search(r"damaged.*name='(step-[\d.]+)' is the one before", process.said)
    if code == 0 or before is None:
        return f"a damaged {path.name} ended in {code}: {process.said[:200]}"
    return run.finished(before[1])


FAULTS: dict[str, Callable[[Disturbed], str]] = {
    "rank killed": kill,
    "rank stopped": stop,
    "launcher killed": launcher,
    "SIGTERM": terminate,
    "two in a row": twice,
    "disk full": full_disk,
    "file damaged": damage,
}


def disturbed(fault: str, scheme: str, ranks: int, seed: int) -> Row:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        run = Disturbed(scheme, ranks, Path(folder), random.Random(f"{fault} {scheme} {seed}"))
        wrong = FAULTS[fault](run)
    return Row(fault=fault, scheme=scheme, ranks=ranks, wrong=wrong, seconds=run.seconds)
