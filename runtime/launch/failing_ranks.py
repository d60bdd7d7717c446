"""The lives of torchrun's ranks: a rank that keeps failing by itself is left out of the next life.

torchrun ends all ranks when one fails, and restarts all of them, including one with broken memory,
until its restarts are used up. So every process records in a file of its own how its lives ended. A
life ends by itself ("alone": killed, or an exception of its own), or with the others ("with
others": SIGTERM from the launcher, a broken connection, a wait for a stopped rank). A process is
left out if its last `IN_A_ROW` lives ended alone, or the last two without a checkpoint in between.
It does not join the process group, waits for the end of the others, and exits with 0. The others
are renumbered.

Rank 0 of the launcher reads the files and tells everyone through the store, so that all decide
alike.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .rank_process import BEAT, last_step

IN_A_ROW = 3
"""The number of successive lives that ended alone after which a rank is left out."""
ALONE = "alone"
WITH_OTHERS = "with others"
FOLDER = "lives"
_DONE = "done"
_LEFT_OUT = "left out"
BY_ANOTHER_RANK = (
    "gloo",
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "timed out",
    "Timed out",
    "NCCL",
    "cannot take part",
)
"""Texts of exceptions that another rank has caused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process of the launcher; `member` stays the same over its lives."""

    member: str
    rank: int
    world: int

    @classmethod
    def of_environment(cls) -> Seat:
        """The seat of this process."""
        rank = os.environ["RANK"]
        local = os.environ.get("LOCAL_RANK", rank)
        member = f"{socket.gethostname()}.{os.getppid()}.{local}"
        return cls(member=member, rank=int(rank), world=int(os.environ["WORLD_SIZE"]))


class Lives:
    """The lives of this process and of the others.

    `folder`: visible to all ranks. `progress`: a text that every new checkpoint changes.
    """

    def __init__(self, folder: Path, progress: str) -> None:
        self.folder = folder / FOLDER
        self.progress = progress
        self.path: Path | None = None
        self._past: list[dict[str, str]] = []

    def leave_out(self, store: Store, limit: timedelta) -> tuple[int, int]:
        """This process's rank and the number of ranks, without those that keep failing.

        For a process that is left out it does not return.
        """
        seat = Seat.of_environment()
        self._begin(seat)
        store.set(f"member {seat.rank}", seat.member)
        if seat.rank == 0:
            members = [store.get(f"member {rank}").decode() for rank in range(seat.world)]
            sweep(self.folder, members)
            # Rank 0 decides: files that change meanwhile would make ranks decide unlike.
            store.set(_LEFT_OUT, json.dumps(failing(self.folder, members, self.progress)))
        store.wait([_LEFT_OUT], limit)
        out: dict[str, int] = json.loads(store.get(_LEFT_OUT))
        if str(seat.rank) in out:
            self._sit_out(store, seat, out[str(seat.rank)])
        # Last, since joining may wait for long, and a signal meanwhile is no failure.
        self._watch_end(store)
        staying = [rank for rank in range(seat.world) if str(rank) not in out]
        return staying.index(seat.rank), len(staying)

    def ended(self, word: str) -> None:
        """Write down how this life ends, the first word counting."""
        if self.path is not None and self._past and self._past[-1]["word"] == ALONE:
            self._past[-1]["word"] = word
            self._write()

    def _begin(self, seat: Seat) -> None:
        """Open this life in the file of this process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"{seat.member}.json"
        self._past = _read(self.path)[-IN_A_ROW:]
        # Whoever is killed writes no word, so a life ends alone until it is known better.
        self._past.append({"word": ALONE, "progress": self.progress})
        self._write()

    def _write(self) -> None:
        """Write the file anew, and rename it, so that nobody reads a half."""
        assert self.path is not None
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(self._past), encoding="utf-8")
        beside.replace(self.path)

    def _remove(self) -> None:
        """Remove the file of a training that is over, and the folder with the last one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _watch_end(self, store: Store) -> None:
        """Have the end of this process recorded, as far as it can tell."""
        before = sys.excepthook

        def excepthook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            """Record whose failure an exception is; another rank's takes one line, no trace."""
            causes.append(kind)
            if not is_of_others(error):
                before(kind, error, trace)
                return
            self.ended(WITH_OTHERS)
            step = "" if last_step() is None else f" in step {last_step()}"
            first = (str(error).splitlines() or [kind.__name__])[0]
            text = f"autopar: rank {os.environ['RANK']} ends{step} because of another: {first}"
            print(text, file=sys.stderr, flush=True)

        def end() -> None:
            """Tell the others that the training is over, unless something has ended it."""
            if not causes:
                with contextlib.suppress(RuntimeError):
                    store.set(_DONE, "")
                self._remove()

        def terminate(number: int, frame: FrameType | None) -> None:
            """End by SIGTERM; at once if the process is on its way out already."""
            if causes:
                os._exit(128 + number)
            causes.append(number)
            sys.exit(128 + number)

        # The exceptions and signals that have ended this process.
        causes: list[Any] = []
        sys.excepthook = excepthook
        atexit.register(end)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, terminate)
        _hear_at_once(signal.SIGTERM, lambda: self.ended(WITH_OTHERS))

    def _sit_out(self, store: Store, seat: Seat, lives: int) -> NoReturn:
        """Wait and end with the others.

        A launcher whose processes have all ended cannot be joined again.
        """
        local = os.environ.get("LOCAL_RANK", seat.rank)
        who = f"local rank {local} of {socket.gethostname()} (rank {seat.rank})"
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        text = f"autopar: {who} has failed by itself in {lives} lives in a row, and is left out"
        print(text, file=sys.stderr, flush=True)
        # An error means that the store has ended, and so have the others.
        with contextlib.suppress(RuntimeError):
            while not store.check([_DONE]):
                time.sleep(BEAT)
        self._remove()
        os._exit(0)


def failing(folder: Path, members: list[str], progress: str) -> dict[str, int]:
    """The ranks to leave out, as texts, with the number of lives in a row that ended alone.

    If that is every rank, the cause is no rank, and nobody is left out.
    """
    ranks = {}
    for rank, member in enumerate(members):
        # The last life of the file is the one that has just begun.
        past = _read(folder / f"{member}.json")[:-1]
        alone = list(itertools.takewhile(lambda life: life["word"] == ALONE, reversed(past)))
        stuck = list(itertools.takewhile(lambda life: life["progress"] == progress, alone))
        if len(alone) >= IN_A_ROW or len(stuck) >= IN_A_ROW - 1:
            ranks[str(rank)] = len(alone)
    return ranks if len(ranks) < len(members) else {}


def is_of_others(error: BaseException) -> bool:
    """Whether an exception only reports that another rank is gone."""
    if isinstance(error, KeyboardInterrupt | dist.DistError):
        return True
    text = str(error)
    return error.__cause__ is None and any(word in text for word in BY_ANOTHER_RANK)


def _read(path: Path) -> list[dict[str, str]]:
    """The lives in a file; none where it cannot be read, or was written by something else."""
    try:
        lives = json.loads(path.read_text(encoding="utf-8"))
        return [{"word": str(life["word"]), "progress": str(life["progress"])} for life in lives]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def sweep(folder: Path, members: list[str]) -> None:
    """Remove the files of processes of earlier launchers."""
    for path in folder.glob("*.json"):
        if path.stem not in members:
            path.unlink(missing_ok=True)


def _hear_at_once(number: signal.Signals, tell: Callable[[], None]) -> None:
    """Call `tell` in a thread on a signal.

    The main thread may wait in a collective, where no handler of Python runs.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while word := os.read(reader, 1):
            if word[0] == number:
                tell()

    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=listen, name="autopar-signals", daemon=True).start()
