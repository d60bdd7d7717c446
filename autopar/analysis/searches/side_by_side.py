"""Pieces of work that need nothing of each other, made side by side by forked processes."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from autopar.errors import RunError, UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

FORKS = platform.system() == "Linux" and hasattr(os, "fork")
"""Whether processes are forked: elsewhere a library's threads may not live through it."""
_work: Callable[[Any], Any]
_items: Sequence[Any]
"""In a forked process: what it was forked for."""


def cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int | None = None
) -> Iterator[Result]:
    """The results of `work`, in the order of the items, whatever the number of processes.

    `jobs`: the processes at a time (None: as many as cores). One does all here, as do systems
    without a safe fork. Results and errors travel between processes, so they must be picklable;
    `work` and items are forked.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}, it must be at least 1")
    count = min(cores() if jobs is None else jobs, len(items))
    # A process that ends with its parent may have no children.
    if count < 2 or not FORKS or multiprocessing.current_process().daemon:
        yield from map(work, items)
        return
    forked = ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), initializer=_take, initargs=(work, items)
    )
    others = {child.pid for child in multiprocessing.active_children()}
    try:
        with warnings.catch_warnings(), _uninterrupted():
            # The children run Python and numpy alone, and take no lock of the parent's threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            promised = [forked.submit(_do, number) for number in range(len(items))]
        for each in promised:
            yield each.result()
    except BrokenProcessPool as error:
        raise RunError(
            "a process beside this one was ended by the system, perhaps for its memory; "
            "fewer at a time need less (jobs=1, --jobs 1)"
        ) from error
    except BaseException:
        # Nobody waits for what was begun.
        for child in multiprocessing.active_children():
            if child.pid not in others:
                child.terminate()
        raise
    finally:
        forked.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: raised between the locks of an executor, it would leave one locked for good."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take(work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _work, _items
    _work = work
    _items = items
    # Ctrl-C reaches all processes: the parent ends these, and says what there is to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _do(number: int) -> Any:
    return _work(_items[number])
