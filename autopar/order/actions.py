"""Actions: the words of a step's order, those of `torch.distributed.pipelining` and more.

The words of torch are extended for units of parameters.

    word            action                                               of
    F               forward pass                                         chunk, segment, micro-batch
    B               backward pass: of inputs and weights at once         chunk, segment, micro-batch
    I, W            backward pass of the inputs; of the weights, later   chunk, segment, micro-batch
    UNSHARD         gather the parameters of a unit: one round of it     chunk, unit, round
    RESHARD         free the gathered parameters                         chunk, unit
    REDUCE_GRAD     bring a unit's gradients to storage: one round of it chunk, unit, round
    SEND_F, RECV_F  hand values on to a later chunk                      chunk, micro-batch, peer
    SEND_B, RECV_B  hand gradients back to an earlier chunk              chunk, micro-batch, peer
    SUM_TIED        sum gradients of parameters that several stages hold -
    UPDATE          update of whole matrices, each by its owner          chunk

A *chunk* is a stretch of the model on one stage, counted from the model's start (torch calls it a
stage). A *segment* is a stretch of a chunk between two actions on parameters. In a *round* every
chain of collectives of a unit issues its next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Word(StrEnum):
    """The kind of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    GATHER = "UNSHARD"
    RELEASE = "RESHARD"
    REDUCE = "REDUCE_GRAD"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    SUM_TIED = "SUM_TIED"
    UPDATE = "UPDATE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action of a rank; fields that do not apply to its word are None."""

    word: Word
    chunk: int = 0
    micro_batch: int | None = None
    segment: int | None = None
    unit: int | None = None
    round: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """The action as torch writes it.

        The segment or unit stands behind a dot, its further rounds behind a plus, the other chunk
        behind an arrow.

        >>> str(Action(word=Word.FORWARD, chunk=2, micro_batch=5))
        '2F5'
        >>> str(Action(word=Word.GATHER, chunk=1, unit=3))
        '1UNSHARD.3'
        >>> str(Action(word=Word.GATHER, chunk=1, unit=3, round=1))
        '1UNSHARD.3+1'
        """
        number = "" if self.micro_batch is None else str(self.micro_batch)
        part = self.segment if self.segment is not None else self.unit
        inside = "" if part is None else f".{part}"
        later = f"+{self.round}" if self.round else ""
        other = "" if self.peer is None else f">{self.peer}"
        return f"{self.chunk}{self.word}{number}{inside}{later}{other}"


Pair = tuple[Action, Action]
"""A forward pass and the backward pass of another micro-batch that it is merged with."""


def one_by_one(items: Iterable[Action | Pair]) -> Iterator[Action]:
    """The actions of an order, those of a pair one after the other."""
    for item in items:
        if isinstance(item, Action):
            yield item
        else:
            yield from item
