"""The order of every stage of a pipeline: its passes, with sends and receives in between.

A message is sent right behind the pass that makes it. It is received before the pass that needs it,
and behind all messages that the same stage sent before. So both ends list the messages between them
in one order, as channels without tags require. This delays nothing: earlier messages have been sent
by the time a later one arrives. What a pair of merged passes needs comes before both, and what they
make is sent behind both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .actions import Action, Pair, Word, one_by_one
from .playing import (
    BACKWARD,
    SENDS,
    Edges,
    Hands,
    Message,
    OrderError,
    Orders,
    message_of,
    stage_of_peer,
)
from .schedules import schedule_for


def pipeline_order(
    schedule: str,
    stages: int,
    micro_batches: int,
    interleave: int = 1,
    *,
    edges: Edges,
    train: bool = True,
) -> list[list[Action | Pair]]:
    """The actions of every stage in a step; without `train` forward passes only.

    `edges`: pairs of chunks; the first hands values to the second and gets their gradients back.

    >>> for actions in pipeline_order("1f1b", 2, 1, edges=neighbours(2)):
    ...     print(*actions)
    0F0 0SEND_F0>1 0RECV_B0>1 0B0
    1RECV_F0>0 1F0 1B0 1SEND_B0>0
    """
    row = schedule_for(schedule, stages, micro_batches, interleave)
    chunks = stages * interleave
    wrong = [edge for edge in edges if not 0 <= edge[0] < edge[1] < chunks]
    if wrong:
        raise OrderError(
            f"no values pass from chunk {wrong[0][0]} to chunk {wrong[0][1]} of {chunks}"
        )
    passes: Orders = [
        row.order(stage, stages, micro_batches, interleave) for stage in range(stages)
    ]
    if not train:
        passes = [[a for a in one_by_one(order) if a.word is Word.FORWARD] for order in passes]
    return with_messages(passes, edges)


def neighbours(chunks: int) -> list[tuple[int, int]]:
    """The edges of a model in which every chunk hands on to the next one only."""
    return [(chunk, chunk + 1) for chunk in range(chunks - 1)]


def with_messages(passes: Orders, edges: Edges) -> list[list[Action | Pair]]:
    """The passes of every stage with sends and receives."""
    hands = Hands.of(passes, edges)
    # All sends first: a receive can only be placed when the order of its sender is known.
    links: dict[tuple[int, int], _Link] = {}
    for stage, order in enumerate(passes):
        for send in (send for action in one_by_one(order) for send in _sends(action, hands)):
            links.setdefault((stage, stage_of_peer(send, hands.stages)), _Link()).add(send)
    orders = []
    for stage, order in enumerate(passes):
        actions: list[Action | Pair] = []
        for item in order:
            for receive in (
                one for action in one_by_one([item]) for one in _receives(action, hands)
            ):
                actions += links[stage_of_peer(receive, hands.stages), stage].upto(receive)
            actions.append(item)
            actions += (send for action in one_by_one([item]) for send in _sends(action, hands))
        orders.append(actions)
    return orders


class _Link:
    """Messages from one stage to another as they are sent, and how many have been received."""

    def __init__(self) -> None:
        self.receives: list[Action] = []
        self.places: dict[Message, int] = {}
        self.taken = 0

    def add(self, send: Action) -> None:
        """Note that one more message is sent."""
        assert send.peer is not None
        self.places[message_of(send)] = len(self.receives)
        self.receives.append(
            Action(
                word=SENDS[send.word],
                chunk=send.peer,
                micro_batch=send.micro_batch,
                peer=send.chunk,
            )
        )

    def upto(self, receive: Action) -> list[Action]:
        """The receives up to this one that are not there yet."""
        start = self.taken
        stop = self.places[message_of(receive)] + 1
        # This one may have come already, along with a message that was sent behind it.
        self.taken = max(start, stop)
        return self.receives[start:stop]


def _sends(action: Action, hands: Hands) -> list[Action]:
    """Messages from a pass to chunks on other stages."""
    if action.word is Word.FORWARD:
        return _messages(action, Word.SEND_FORWARD, hands.later, hands)
    if action.word in BACKWARD:
        return _messages(action, Word.SEND_BACKWARD, hands.earlier, hands)
    return []


def _receives(action: Action, hands: Hands) -> list[Action]:
    """Messages that a pass needs from chunks on other stages."""
    if action.word is Word.FORWARD:
        return _messages(action, Word.RECEIVE_FORWARD, hands.earlier, hands)
    if action.word in BACKWARD:
        return _messages(action, Word.RECEIVE_BACKWARD, hands.later, hands)
    return []


def _messages(
    action: Action, word: Word, others: Mapping[int, Sequence[int]], hands: Hands
) -> list[Action]:
    return [
        Action(word=word, chunk=action.chunk, micro_batch=action.micro_batch, peer=other)
        for other in others.get(action.chunk, ())
        # Chunks of one stage find each other's values in memory.
        if not hands.near(action.chunk, other)
    ]
