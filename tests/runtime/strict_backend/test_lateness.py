"""Operations of stated times on ranks: one after the other in a queue, queues side by side."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.process_groups import parameter_group
from autopar.runtime.strict_backend import Clock, holding
from tests.runtime.virtual_clock import VirtualClock

pytestmark = pytest.mark.usefixtures("strict_ranks")


def _hold(kind: str, ranks: tuple[int, ...]) -> float:
    return {"all_reduce": 1.0, "broadcast": 0.25}[kind] * len(ranks)


def _times() -> list[float]:
    """The times of a program in which rank 1 issues half a second after rank 0."""
    clock = VirtualClock()
    other = parameter_group([0, 1])
    tensors = [torch.ones(2) for _ in range(4)]
    with holding(_hold, clock):
        clock.wait_until(0.5 * dist.get_rank())
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:2]]
        works += [dist.broadcast(tensors[2], 0, async_op=True)]
        works += [dist.all_reduce(tensors[3], group=other, async_op=True)]
        times = [clock.now()]
        for number in (0, 3, 2):
            assert number == 3 or not works[number].is_completed()
            works[number].wait()
            assert works[number].is_completed()
            times.append(clock.now())
        works[1].wait()
    return [*times, clock.now()]


def test_a_queue_begins_when_all_ranks_have_come_and_takes_its_time() -> None:
    """The other queue of the same ranks runs beside it, and what is over is not waited for."""
    assert run_ranks(_times, 2, timeout=60.0) == [
        [0.0, 2.5, 2.5, 5.0, 5.0],
        [0.5, 2.5, 2.5, 5.0, 5.0],
    ]


def _passed() -> tuple[float, float]:
    clock = Clock()
    value = torch.ones(2)
    begun = time.monotonic()
    with holding(lambda kind, ranks: 0.1, clock):
        works = [dist.all_reduce(value, async_op=True) for _ in range(3)]
        issued = time.monotonic() - begun
        for work in works:
            work.wait()
    return issued, time.monotonic() - begun


def test_on_the_clock_of_the_machine_a_wait_takes_time() -> None:
    for issued, over in run_ranks(_passed, 2, timeout=60.0):
        assert over >= 0.3 and issued < over
