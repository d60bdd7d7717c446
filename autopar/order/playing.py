"""Plays the orders of all stages together.

It finds out whether they run to the end, and in which sequence their actions may run.

Sends never wait. A receive waits until its message is the next one from its peer's stage, because
messages from one stage to another arrive in the order in which they were sent. Everything else
follows the stage's own list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .actions import Action, Pair, Word, one_by_one

Orders = Sequence[Sequence[Action | Pair]]
Edges = Collection[tuple[int, int]]
"""Pairs of chunks (earlier, later); the earlier hands values to the later."""
Message = tuple[Word, int, int, int | None]
"""The word of its send, the chunks of sender and receiver, and the micro-batch."""

BACKWARD = (Word.BACKWARD, Word.BACKWARD_INPUT)
SENDS = {Word.SEND_FORWARD: Word.RECEIVE_FORWARD, Word.SEND_BACKWARD: Word.RECEIVE_BACKWARD}
RECEIVES = {receive: send for send, receive in SENDS.items()}


class OrderError(ValueError):
    """Orders of stages that cannot run together: a mistake of the code that made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """The stage of every chunk, and the chunks that it exchanges values with.

    `later`: the chunks that take values from a chunk. `earlier`: those that give it values.
    """

    stages: Mapping[int, int]
    later: Mapping[int, Sequence[int]]
    earlier: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, orders: Orders, edges: Edges) -> Hands:
        """The stages and neighbours of the chunks in the orders."""
        later: dict[int, list[int]] = {}
        earlier: dict[int, list[int]] = {}
        # Sorted, so that a pass sends in one order, however the edges are listed.
        for a, b in sorted(set(edges)):
            later.setdefault(a, []).append(b)
            earlier.setdefault(b, []).append(a)
        return cls(stages=stages_of_chunks(orders), later=later, earlier=earlier)

    def near(self, chunk: int, other: int) -> bool:
        """Whether both chunks are on one stage."""
        return self.stages.get(chunk) == self.stages.get(other)


def play(orders: Orders) -> Iterator[tuple[int, Action | Pair]]:
    """Every action or pair with its stage, none before the message that it waits for.

    Raises `OrderError` if all stages wait.
    """
    stages = stages_of_chunks(orders)
    under_way: dict[tuple[int, int], deque[Message]] = {}
    reached = [0] * len(orders)
    while True:
        before = sum(reached)
        # Each stage runs as far as it can: sends never wait, so any fair sequence reaches the end.
        for stage, order in enumerate(orders):
            while reached[stage] < len(order):
                action = order[reached[stage]]
                if not isinstance(action, Action):
                    pass
                elif action.word in RECEIVES:
                    coming = under_way.get((stage_of_peer(action, stages), stage))
                    if not coming or coming[0] != message_of(action):
                        break
                    coming.popleft()
                elif action.word in SENDS:
                    under_way.setdefault((stage, stage_of_peer(action, stages)), deque()).append(
                        message_of(action)
                    )
                reached[stage] += 1
                yield stage, action
        # A round in which no stage moved: all are done, or all wait for one another.
        if sum(reached) == before:
            break
    waiting = [
        f"stage {s} at {order[at]}"
        for s, (order, at) in enumerate(zip(orders, reached, strict=True))
        if at < len(order)
    ]
    if waiting:
        raise OrderError(f"the order waits for itself: {', '.join(waiting)}")


def stages_of_chunks(orders: Orders) -> dict[int, int]:
    """The stage of every chunk that some action is of."""
    stages: dict[int, int] = {}
    for stage, order in enumerate(orders):
        for action in one_by_one(order):
            if stages.setdefault(action.chunk, stage) != stage:
                raise OrderError(
                    f"chunk {action.chunk} is on stage {stages[action.chunk]} and on stage {stage}"
                )
    return stages


def message_of(action: Action) -> Message:
    """The message that an action sends or receives."""
    if action.word in RECEIVES:
        return (RECEIVES[action.word], _peer(action), action.chunk, action.micro_batch)
    return (action.word, action.chunk, _peer(action), action.micro_batch)


def stage_of_peer(action: Action, stages: Mapping[int, int]) -> int:
    """The stage that a send or receive leads to."""
    other = _peer(action)
    if other not in stages:
        raise OrderError(f"{action} leads to chunk {other}, which no stage holds")
    return stages[other]


def _peer(action: Action) -> int:
    if action.peer is None:
        raise OrderError(f"{action} does not say with which chunk")
    return action.peer
