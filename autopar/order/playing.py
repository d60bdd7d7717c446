"""Plays the orders of all stages together.

It finds out whether they run to the end, and in which sequence their actions may run.

Sends never wait. A receive waits until its message is the next one from its peer's stage, because
messages from one stage to another arrive in the order in which they were sent. Everything else
follows the stage's own list.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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


def check_order(orders: Orders, edges: Edges) -> None:
    """Raise an `OrderError` unless the orders run to their end with all messages received.

    Each action must stand behind those it needs. Messages from one stage to another, forward and
    backward, must be sent in the order in which they are received.
    """
    _check_messages(orders)
    hands = Hands.of(orders, edges)
    done = set[Action]()
    for stage, item in play(orders):
        # Passes that are merged run at once, so that neither may need the other.
        for action in one_by_one([item]):
            for needed in _needs(action, hands):
                if done.isdisjoint(needed):
                    raise OrderError(
                        f"stage {stage} runs {action} before {' or '.join(map(str, needed))}"
                    )
        # What an action needs is told by chunk and micro-batch, not by segment.
        done.update(replace(action, segment=None) for action in one_by_one([item]))


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


def _check_messages(orders: Orders) -> None:
    """Check that each stage receives the messages sent to it, in the order of sending."""
    stages = stages_of_chunks(orders)
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for stage, order in enumerate(orders):
        for action in one_by_one(order):
            if action.word in SENDS:
                sent.setdefault((stage, stage_of_peer(action, stages)), []).append(
                    message_of(action)
                )
            elif action.word in RECEIVES:
                received.setdefault((stage_of_peer(action, stages), stage), []).append(
                    message_of(action)
                )
    # Sorted, so that of several mistakes the same one is always told.
    for pair in sorted({*sent, *received}):
        ahead = Counter(sent.get(pair, []))
        behind = Counter(received.get(pair, []))
        between = f"from stage {pair[0]} to stage {pair[1]}"
        for message in (ahead - behind) or (behind - ahead):
            raise OrderError(
                f"{between} {_text(message)} is "
                f"{'not received' if message in ahead - behind else 'not sent'}"
            )
        # Both lists hold the same messages by now, so the pair is in both.
        for first, second in zip(sent[pair], received[pair], strict=True):
            if first != second:
                raise OrderError(
                    f"{between} {_text(first)} is sent where {_text(second)} is received"
                )


def _text(message: Message) -> str:
    return str(Action(word=message[0], chunk=message[1], peer=message[2], micro_batch=message[3]))


def _needs(action: Action, hands: Hands) -> Iterator[list[Action]]:
    """Requirements of an action, each a list of which one action must be done before it."""

    def of(word: Word, chunk: int = action.chunk, peer: int | None = None) -> Action:
        return Action(word=word, chunk=chunk, micro_batch=action.micro_batch, peer=peer)

    match action.word:
        case Word.FORWARD:
            for a in hands.earlier.get(action.chunk, ()):
                yield (
                    [of(Word.FORWARD, a)]
                    if hands.near(a, action.chunk)
                    else [of(Word.RECEIVE_FORWARD, peer=a)]
                )
        case Word.BACKWARD | Word.BACKWARD_INPUT:
            yield [of(Word.FORWARD)]
            for b in hands.later.get(action.chunk, ()):
                yield (
                    [of(word, b) for word in BACKWARD]
                    if hands.near(b, action.chunk)
                    else [of(Word.RECEIVE_BACKWARD, peer=b)]
                )
        case Word.BACKWARD_WEIGHT:
            yield [of(Word.BACKWARD_INPUT)]
        case Word.SEND_FORWARD:
            yield [of(Word.FORWARD)]
        case Word.SEND_BACKWARD:
            yield [of(word) for word in BACKWARD]
