"""Ranks forked from this process, watched until the last is through or one has failed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from autopar.errors import RunError

from . import rank_process
from .failing_ranks import BY_ANOTHER_RANK
from .rank_process import BEAT, Limits, Meeting, Start, rank_main
from .termination import ASKED, TERM_GRACE, Ending, end_by_sigterm, on_sigterm

GRACE = 0.5
"""Seconds in which other ranks may report after the first failure: one of them may explain it."""
SILENCE = 60.0
"""Seconds without a sign of life after which a rank is given up."""
_LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class _Rank:
    """A forked rank as its parent sees it."""

    number: int
    process: BaseProcess
    pipe: Connection
    result: Any = None
    error: str | None = None
    done: bool = False
    step: int | None = None
    silent: float = 0.0

    def read(self) -> bool:
        """Read a rank's message, or note that it ended without one; whether it is through."""
        self.silent = 0.0
        try:
            kind, payload = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE)
            code = self.process.exitcode
            how = f"ended with exit code {code}"
            if code is not None and code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            self.error = f"rank {self.number} {how}{_in_step([self])} before it was done"
            return True
        match kind:
            case "alive":
                self.step = payload
            case "done":
                self.done = True
                self.result = payload
            case _:
                self.error = f"rank {self.number} failed{_in_step([self])}:\n{payload}"
        return self.done or self.error is not None


def fork_ranks(
    function: Callable[..., Any],
    nproc: int,
    args: tuple[Any, ...],
    timeout: float,
    caller: Connection | None = None,
    *,
    endless: bool = False,
) -> list[Any]:
    """The results of `function(*args)` on `nproc` ranks.

    If `caller` goes away, the ranks are ended; it writes `ASKED` when it gets SIGTERM. SIGTERM is
    passed on to the ranks, which have `TERM_GRACE` seconds to end. If all of them end in good
    order, this process does too; else it ends by the signal. endless: the call may take any time,
    and `timeout` bounds the collectives alone.
    """
    ranks: list[_Rank] = []

    def running() -> list[int]:
        """The process ids of the ranks that have not reported a result."""
        pids = (rank.process.pid for rank in ranks if not rank.done)
        return [pid for pid in pids if pid is not None]

    ending = Ending(running)
    # Forks have torch imported already, which costs a new process seconds.
    context = multiprocessing.get_context("fork")
    lifeline, alive = context.Pipe(duplex=False)
    store: TCPStore | None = None
    meetings: list[Meeting] = []
    ends = _Ends(lifeline=lifeline, alive=alive)
    try:
        # A collective waits as long as on ranks of a launcher, unless the whole call is shorter.
        late = timeout if endless else min(timeout, rank_process.LATE)
        # Served by this process, the store outlives every rank. Its thread is not in the forks,
        # which hold their own connections to it.
        store = _serve()
        meetings = [_meeting(store.port, late) for _ in range(nproc)]
        _start(ranks, function, meetings, args, Limits(whole=timeout, late=late), ends)
        with on_sigterm(ending.ask):
            results = _collect(ranks, math.inf if endless else timeout, caller, ending)
        if ending.asked and caller is None:
            raise SystemExit(0)
        return results
    except RunError as error:
        if caller is not None or not ending.asked:
            raise
        failure = str(error)
    finally:
        _end(ranks)
        del store, meetings
        alive.close()
        lifeline.close()
    end_by_sigterm(failure)


def _serve() -> TCPStore:
    """A store that a thread of this process serves, for this machine alone."""
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    handle = listener.detach()
    return TCPStore(_LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=handle)


def _meeting(port: int, late: float) -> Meeting:
    """Connections to the store, for one rank to inherit, which has none to make itself."""
    # Whoever connects has torch look up names, under a lock of glibc that stays locked in a process
    # which is forked meanwhile, whatever thread of its parent holds it.
    limit = timedelta(seconds=late)
    store, watch = (
        TCPStore(_LOOPBACK, port, None, False, limit, wait_for_workers=False) for _ in range(2)
    )
    # An answer shows that the thread of the store has looked up its peer and is through with it.
    store.num_keys()
    watch.num_keys()
    return Meeting(store=store, watch=watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Both ends of the lifeline, which ranks inherit."""

    lifeline: Connection
    alive: Connection


def _start(
    ranks: list[_Rank],
    function: Callable[..., Any],
    meetings: Sequence[Meeting],
    args: tuple[Any, ...],
    limits: Limits,
    ends: _Ends,
) -> None:
    """Fork a rank for each meeting, one after the other."""
    context = multiprocessing.get_context("fork")
    world = len(meetings)
    # The ranks share the cores of this machine.
    threads = max(1, (os.cpu_count() or 1) // world) if _release_threads() else 1
    # Text in the buffer would be printed once by every rank.
    sys.stdout.flush()
    sys.stderr.flush()
    for number, meeting in enumerate(meetings):
        reader, writer = context.Pipe(duplex=False)
        start = Start(
            number=number,
            world=world,
            threads=threads,
            limits=limits,
            parent=os.getpid(),
            pipe=writer,
            lifeline=ends.lifeline,
            foreign=[*(rank.pipe for rank in ranks), reader, ends.alive],
            meeting=meeting,
        )
        process = context.Process(
            target=rank_main, args=(start, function, args), daemon=True, name=f"rank {number}"
        )
        with quiet_fork():
            process.start()
        # An end that stayed open here would hide that the rank is gone.
        writer.close()
        ranks.append(_Rank(number=number, process=process, pipe=reader))


@contextlib.contextmanager
def quiet_fork() -> Iterator[None]:
    """Suppress Python's warning that a process with threads forks.

    `_release_threads` ends the threads of libraries; no rank needs the others, or a lock that they
    may hold.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
        )
        yield


def _collect(
    ranks: list[_Rank], timeout: float, caller: Connection | None, ending: Ending
) -> list[Any]:
    """Wait for all ranks, or for the first failure and its explanation."""
    deadline = time.monotonic() + timeout
    pending = {rank.pipe: rank for rank in ranks}
    failed: list[_Rank] = []
    while pending and time.monotonic() < min(deadline, ending.deadline):
        asleep = time.monotonic()
        pipes = [*pending, caller] if caller else [*pending]
        ready = wait(pipes, timeout=max(0.0, min(BEAT, deadline - asleep)))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            if pipe is caller:
                _listen(pipe, ending)
                continue
            rank = pending[pipe]
            if rank.read():
                del pending[pipe]
            if rank.error is not None:
                if not failed:
                    deadline = min(deadline, time.monotonic() + GRACE)
                failed.append(rank)
        # While this process was stopped, so were its ranks: however long that was, it counts as
        # little.
        _miss(pending.values(), min(time.monotonic() - asleep, 2 * BEAT), failed)
    if failed:
        raise RunError(_cause(failed, list(pending.values())))
    if pending:
        late = ", ".join(str(rank.number) for rank in pending.values())
        limit = f"{TERM_GRACE:g} s of SIGTERM" if ending.asked else f"{timeout:g} s"
        raise RunError(f"rank {late} did not finish within {limit}")
    return [rank.result for rank in ranks]


def _listen(caller: Connection, ending: Ending) -> None:
    """Take a word of the caller: SIGTERM to pass on, or the end of the connection."""
    try:
        word = caller.recv_bytes()
    except (EOFError, OSError):
        word = b""
    if word != ASKED:
        raise RunError("the process that started the ranks has ended")
    ending.ask()


def _miss(pending: Iterable[_Rank], seconds: float, failed: list[_Rank]) -> None:
    """Give up the ranks that have not been heard of for too long."""
    for rank in pending:
        rank.silent += seconds
    silent = [rank for rank in pending if rank.silent > SILENCE]
    if silent and not failed:
        raise RunError(f"{_named(silent)} not been heard of for {SILENCE:g} s{_in_step(silent)}")


def _cause(failed: list[_Rank], pending: list[_Rank]) -> str:
    """The failure that explains the others."""
    first = min(failed, key=_is_consequence)
    assert first.error is not None
    if "timed out" in first.error.lower() and pending:
        return (
            f"{_named(pending)} not joined in what the others waited for"
            f"{_in_step(pending)}: {first.error}"
        )
    return first.error


def _is_consequence(rank: _Rank) -> int:
    """How much a rank's failure looks like that of another.

    A rank that died without a word explains the broken connections that its peers report, often
    before the rank whose own error broke them has told it.
    """
    error = str(rank.error).strip()
    if error.endswith("before it was done"):
        return 0
    return 1 + any(text in error.splitlines()[-1] for text in BY_ANOTHER_RANK)


def _named(ranks: Sequence[_Rank]) -> str:
    """Ranks by number, with the verb that follows."""
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return f"ranks {numbers} have" if len(ranks) > 1 else f"rank {numbers} has"


def _in_step(ranks: Sequence[_Rank]) -> str:
    """The step in which the first of the ranks last was, as far as it told."""
    return "" if ranks[0].step is None else f" in step {ranks[0].step}"


def _end(ranks: list[_Rank]) -> None:
    """Leave no process behind: finished ranks exit by themselves, others are killed."""
    for rank in ranks:
        if rank.done:
            rank.process.join(GRACE)
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.process.close()
        rank.pipe.close()


def _release_threads() -> bool:
    """End OpenMP's worker threads, since a forked child hangs in its first parallel region else.

    False where the library does not offer it; the ranks then run on one thread each.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        files = {line.split(maxsplit=5)[5] for line in maps if "omp" in line and ".so" in line}
        known = ("libgomp", "libiomp", "libomp")
        libraries = [file for file in files if Path(file).name.startswith(known)]
        # 1 is omp_pause_soft: the threads end, and a later region starts new ones.
        paused = [ctypes.CDLL(file).omp_pause_resource_all(1) == 0 for file in libraries]
        return bool(libraries) and all(paused)
    except (OSError, AttributeError, IndexError):
        return False
