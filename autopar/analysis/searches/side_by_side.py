"""Pieces of work that need nothing of each other, made side by side by forked processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from autopar.errors import RunError
from autopar.forking import be_beside, forking, processes

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[[Any], Any]
_items: Sequence[Any]
"""In a forked process: what it was forked for."""


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int | None = None
) -> Iterator[Result]:
    """The results of `work`, in the order of the items, whatever the number of processes.

    `jobs`: the processes at a time (None: as many as cores). One does all here, as do systems
    without a safe fork. Results and errors travel between processes, so they must be picklable;
    `work` and items are forked.
    """
    count = min(processes(jobs), len(items))
    if count < 2:
        yield from map(work, items)
        return
    forked = ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), initializer=_take, initargs=(work, items)
    )
    others = {child.pid for child in multiprocessing.active_children()}
    try:
        with forking():
            promised = [forked.submit(_do, number) for number in range(len(items))]
        for each in promised:
            yield each.result()
    except BrokenProcessPool as error:
        raise RunError(
            "a process beside this one was ended by the system, perhaps for its memory; "
            "fewer at a time need less (`taskset -c 0` leaves one core)"
        ) from error
    except BaseException:
        # Nobody waits for what was begun.
        for child in multiprocessing.active_children():
            if child.pid not in others:
                child.terminate()
        raise
    finally:
        forked.shutdown(wait=True, cancel_futures=True)


def _take(work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _work, _items
    _work = work
    _items = items
    be_beside()


def _do(number: int) -> Any:
    return _work(_items[number])
