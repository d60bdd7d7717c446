"""Work side by side: its results and their order, errors, and processes that end early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from autopar.analysis.searches.side_by_side import side_by_side
from autopar.errors import RunError, UsageError
from autopar.forking import cores

ITEMS = list(range(7))


@pytest.mark.parametrize("jobs", [None, 1, 2, 3, 16])
def test_results_come_in_the_order_of_the_items(jobs: int | None) -> None:
    factor = 3  # in a closure, which a forked process has
    assert list(side_by_side(lambda item: factor * item, ITEMS, jobs)) == [0, 3, 6, 9, 12, 15, 18]
    assert list(side_by_side(lambda item: item, [], jobs)) == []


def test_items_need_not_travel() -> None:
    items = [lambda number=number: number for number in ITEMS]
    assert list(side_by_side(lambda item: item(), items, 2)) == ITEMS


def test_each_process_is_another() -> None:
    assert set(side_by_side(lambda _: os.getpid(), ITEMS, 1)) == {os.getpid()}
    assert os.getpid() not in set(side_by_side(lambda _: os.getpid(), ITEMS, 2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_is_raised_here(jobs: int) -> None:
    def work(item: int) -> int:
        if item == 2:
            raise UsageError(f"no {item}")
        return item

    results = side_by_side(work, ITEMS, jobs)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(UsageError, match="no 2"):
        next(results)


def test_a_process_that_is_ended_is_told() -> None:
    with pytest.raises(RunError, match="taskset"):
        list(side_by_side(lambda _: os._exit(1), ITEMS, 2))


def test_an_interrupt_ends_all_at_once() -> None:
    text = (
        "import time\n"
        "from autopar.analysis.searches.side_by_side import side_by_side\n"
        "def work(item):\n"
        "    print(item, flush=True)\n"
        "    time.sleep(60)\n"
        "list(side_by_side(work, range(9), 2))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() and started.stdout.readline()
        os.killpg(started.pid, signal.SIGINT)
        _, told = started.communicate(timeout=30)
    assert told.count("Traceback") == 1 and "KeyboardInterrupt" in told


def test_processes_are_at_least_one() -> None:
    with pytest.raises(UsageError, match="jobs is 0"):
        list(side_by_side(str, ITEMS, 0))
    assert cores() >= 1
