"""Orders of pipelines on backends whose sends wait for their receives, as those of NCCL.

Each direction between two stages has a queue of its own, so every schedule runs to its end. With
one queue for both directions most of them stand still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator

import pytest

from autopar.order.actions import Word, one_by_one
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.playing import SENDS, Orders
from autopar.order.schedules import SCHEDULES

Queue = Callable[[int, int], Hashable]
"""The name of the queue for messages from one stage to another."""
Waiting = tuple[bool, int]
"""An operation in a queue: whether it sends, and the other stage."""


def a_direction(source: int, target: int) -> Hashable:
    """A queue for each direction."""
    return source, target


def a_pair(source: int, target: int) -> Hashable:
    """A queue for both directions."""
    return min(source, target), max(source, target)


def left_over(given: Orders, queue: Queue) -> int:
    """The number of actions that never begin; stages go on behind sends, not behind receives."""
    orders = [list(one_by_one(order)) for order in given]
    stages = len(orders)
    places = [0] * stages
    queues: dict[tuple[Hashable, int], deque[Waiting]] = {}
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        while places[stage] < len(orders[stage]):
            action = orders[stage][places[stage]]
            places[stage] += 1
            if action.peer is None:
                continue
            other = action.peer % stages
            sends = action.word in SENDS
            name = queue(stage, other) if sends else queue(other, stage)
            queues.setdefault((name, stage), deque()).append((sends, other))
            # Whoever has received may go on.
            received = list(_met(queues, name, stage, other))
            ready.extend(one for one in received if one != stage)
            if not sends and stage not in received:
                break
    return sum(map(len, orders)) - sum(places) + sum(map(len, queues.values()))


def _met(
    queues: dict[tuple[Hashable, int], deque[Waiting]], name: Hashable, stage: int, other: int
) -> Iterator[int]:
    """Let the heads of two stages' queues meet while they fit; the stages that have received."""
    own = queues.get((name, stage), deque())
    others = queues.get((name, other), deque())
    while own and others and own[0] == (not others[0][0], other) and others[0][1] == stage:
        sends, _ = own.popleft()
        others.popleft()
        yield other if sends else stage


def _cases(stages: int) -> Iterator[tuple[str, int, int]]:
    """Schedule, micro-batches, chunks a stage."""
    for name, row in SCHEDULES.items():
        for interleave in range(1, 5) if row.chunks else [1]:
            for count in range(1, 33):
                if not row.refusal(stages, count, interleave):
                    yield name, count, interleave


@pytest.mark.parametrize("stages", range(2, 17))
def test_every_schedule_runs_to_its_end(stages: int) -> None:
    """1 to 32 micro-batches, 1 to 4 chunks a stage."""
    cases = list(_cases(stages))
    assert {name for name, _, _ in cases} == set(SCHEDULES)
    for name, count, interleave in cases:
        edges = neighbours(stages * interleave)
        orders = pipeline_order(name, stages, count, interleave, edges=edges)
        assert not left_over(orders, a_direction), (name, count, interleave)


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_values_that_skip_stages_hold_nothing_up(stages: int) -> None:
    for name, count, interleave in _cases(stages):
        chunks = stages * interleave
        edges = [*neighbours(chunks), *((0, chunk) for chunk in range(2, chunks))]
        if count in (1, 2, stages, 2 * stages):
            orders = pipeline_order(name, stages, count, interleave, edges=edges)
            assert not left_over(orders, a_direction), (name, count, interleave)


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_one_queue_for_both_directions_most_stand_still(name: str) -> None:
    interleave = 2 if SCHEDULES[name].chunks else 1
    orders = pipeline_order(name, 4, 8, interleave, edges=neighbours(4 * interleave))
    assert bool(left_over(orders, a_pair)) == (name != "gpipe")
    assert Word.SEND_BACKWARD in {a.word for order in orders for a in one_by_one(order)}
