"""The life of a forked rank: it joins the others, calls its function, and reports.

It does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from autopar.runtime import strict_backend

BEAT = 1.0
"""Seconds between two signs of life of a rank."""
SELDOM = 1000
"""Collections of younger objects before a whole one."""
LATE = 600.0
"""Seconds that a rank may be late to a collective: it may compile, wait for data, or evaluate."""
_PR_SET_PDEATHSIG = 1
BACKEND = "AUTOPAR_BACKEND"
"""The environment variable with the backend of forked ranks: gloo (the default) or strict."""

Kind = Literal["alive", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds of a whole call, and seconds that a rank may be late to a collective in it."""

    whole: float
    late: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A rank's connections to the parent's store, in which the ranks find each other.

    `watch`: for a thread that must not wait behind a request of another.
    """

    store: TCPStore
    watch: TCPStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The data that a rank gets at its start."""

    number: int
    world: int
    threads: int
    limits: Limits
    parent: int
    """The parent's process id."""
    pipe: Connection
    """To the parent: `(kind, payload)`; the payload of `alive` is the step."""
    lifeline: Connection
    """From the parent, who never writes: it ends when the parent does."""
    foreign: Sequence[Connection]
    """Inherited ends to close: open here they would hide that their owner is gone."""
    meeting: Meeting


class _Steps:
    """The steps of this process: the present one and the last one.

    tell: gives a sign of life. watch: what begins with the first step.
    """

    def __init__(self) -> None:
        self.current: int | None = None
        self.last: int | None = None
        self.tell: Callable[[], None] = lambda: None
        self.watch: Callable[[], None] | None = None


_steps = _Steps()


def in_steps(count: int) -> Iterator[int]:
    """The numbers of the steps of a rank, from 0: `for number in in_steps(100)`."""
    for number in range(count):
        begin_step(number)
        yield number
    end_steps()


def begin_step(number: int) -> None:
    """Begin step `number`, counted from 0; messages about a missing rank name the step."""
    _steps.current = number
    _steps.last = number
    if _steps.watch is not None:
        begin = _steps.watch
        _steps.watch = None
        begin()
    _steps.tell()


def at_first_step(begin: Callable[[], None]) -> None:
    """Call `begin` when the first step begins."""
    _steps.watch = begin


def current_step() -> int | None:
    """The step that runs, if one does."""
    return _steps.current


def last_step() -> int | None:
    """The step that ran last, also where it has failed."""
    return _steps.last


def end_steps() -> None:
    """End the last step: messages name none from now on."""
    _steps.current = None
    _steps.tell()


def rank_main(start: Start, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """Run as rank `start.number`, and end by `os._exit`, without the parent's exit handlers."""
    # Ctrl-C reaches parent and ranks alike; the parent ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(start.parent)
    for end in start.foreign:
        end.close()
    # A rank dies with its parent by other means, and a data loader's workers are its children.
    multiprocessing.current_process().daemon = False
    # Whole collections copy every page of the parent's objects.
    gc.set_threshold(*gc.get_threshold()[:2], SELDOM)
    send = _attach(start)
    status = 1
    try:
        _join(start)
        payload = pickle.dumps(("done", function(*args)))
        _wait_for_all(start.limits.whole)
        status = 0
    except SystemExit as ended:
        # As Python ends a process: None is 0, a text is 1.
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        payload = pickle.dumps(("failed", f"exit code {status}") if status else ("done", None))
    except BaseException:
        payload = pickle.dumps(("failed", traceback.format_exc()))
    send(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait_for_all(seconds: float) -> None:
    """Wait until every rank has come to its end, for as long as the whole call may take.

    A rank that ended before the others have joined would break their connections.
    """
    world = dist.group.WORLD
    assert world is not None
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=seconds)
    world.barrier(options).wait()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    That is on Linux; elsewhere the lifeline tells.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)


def _attach(start: Start) -> Callable[[bytes], None]:
    """Begin to give signs of life; returns the function that sends a message to the parent."""
    lock = threading.Lock()

    def send(message: bytes) -> None:
        """Send a message; a parent that is gone needs none."""
        with lock, contextlib.suppress(BrokenPipeError):
            start.pipe.send_bytes(message)

    def tell() -> None:
        """Give a sign of life, with the present step."""
        send(pickle.dumps(("alive", _steps.current)))

    def watch() -> None:
        """Give signs of life until the parent ends, and end with it."""
        while not wait([start.lifeline], timeout=BEAT):
            tell()
        os._exit(1)

    _steps.current = None
    _steps.tell = tell
    threading.Thread(target=watch, name="autopar-lifeline", daemon=True).start()
    return send


def _join(start: Start) -> None:
    """Form the process group with the other ranks."""
    torch.set_num_threads(start.threads)
    if sys.platform == "linux":
        # Gloo would else look up the host's name, which may have no address of this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    limit = timedelta(seconds=start.limits.late)
    store = start.meeting.store
    place: dict[str, Any] = {"store": store, "rank": start.number, "world_size": start.world}
    if os.environ.get(BACKEND) == strict_backend.NAME:
        strict_backend.init_process_group(**place, watch=start.meeting.watch, timeout=limit)
    else:
        dist.init_process_group("gloo", **place, timeout=limit)
