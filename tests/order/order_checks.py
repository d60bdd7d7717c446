"""Checks that the orders of all stages run together: the oracle of the tests of orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from autopar.order.actions import Action, Word, one_by_one
from autopar.order.playing import (
    BACKWARD,
    RECEIVES,
    SENDS,
    Edges,
    Hands,
    Message,
    OrderError,
    Orders,
    message_of,
    play,
    stage_of_peer,
    stages_of_chunks,
)


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
