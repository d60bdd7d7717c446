"""Statements of ranks about the operations at the heads of their queues, and how they must agree.

A communicator is one queue. All ranks of a collective state the same kind, type and size. Ranks
that exchange messages state the same messages, seen from either end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

BYTES = 2048
"""Bytes of a statement on its way."""
REMEMBERED = 6
"""The operations before the present one that a statement names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The operation at the head of a rank's queue.

    `facts`: in words, equal on all ranks of a collective. `outgoing`, `incoming`: parts to and from
    each rank of the group, or messages to and from one rank. `members`: the new group that this
    rank joins in a split; empty if it joins none. `before`: the operations before, the last one
    last. `start`: the time at which this rank's queue begins it (`lateness`).
    """

    rank: int
    kind: str
    facts: str = ""
    action: str = ""
    outgoing: tuple[str, ...] = ()
    incoming: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    before: tuple[str, ...] = ()
    start: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}{f' {self.facts}' if self.facts else ''}{self._where()}"

    def _where(self) -> str:
        return f" (in action {self.action})" if self.action else ""

    def order(self) -> str:
        """The rank's order in this queue, the present operation last."""
        return f"rank {self.rank}: " + "; ".join((*self.before, str(self)))

    def to_bytes(self) -> bytes:
        """The statement in `BYTES` bytes; it forgets operations before that have no room."""
        values = asdict(self)
        text = json.dumps(values).encode()
        while len(text) > BYTES and values["before"]:
            values["before"] = values["before"][1:]
            text = json.dumps(values).encode()
        return text[:BYTES].ljust(BYTES)

    @classmethod
    def from_bytes(cls, message: bytes) -> Statement:
        """The statement that `to_bytes` wrote."""
        values = json.loads(message)
        for name in ("outgoing", "incoming", "members", "before"):
            values[name] = tuple(values[name])
        return cls(**values)


def orders(statements: Sequence[Statement]) -> str:
    """The orders of ranks, a line each."""
    return "\n".join(f"  {statement.order()}" for statement in statements)


def collective_difference(statements: Sequence[Statement]) -> str:
    """The first disagreement of the ranks of a collective, in words; empty if there is none."""
    first = statements[0]
    for other in statements[1:]:
        if (other.kind, other.facts) != (first.kind, first.facts):
            return _unlike(first, other)
    for one in statements:
        for number, other in enumerate(statements):
            if one.outgoing and one.outgoing[number] != other.incoming[statements.index(one)]:
                return _unlike_parts(one, other, number, statements.index(one))
    by_rank = {statement.rank: statement for statement in statements}
    for one in statements:
        for member in one.members:
            if by_rank[member].members != one.members:
                return _unlike_groups(one, by_rank[member])
    return ""


def _unlike(one: Statement, other: Statement) -> str:
    return f"{one} on rank {one.rank}, but {other} on rank {other.rank}:\n{orders((one, other))}"


def _unlike_parts(one: Statement, other: Statement, to: int, source: int) -> str:
    return (
        f"rank {one.rank} sends {one.outgoing[to]} to rank {other.rank}, which expects "
        f"{other.incoming[source]}:\n{orders((one, other))}"
    )


def _unlike_groups(one: Statement, other: Statement) -> str:
    return (
        f"rank {one.rank} makes the group {one.members} while rank {other.rank} makes "
        f"{other.members or 'none'}:\n{orders((one, other))}"
    )


def message_difference(one: Statement, other: Statement) -> str:
    """The disagreement of two ranks about the messages between them; empty if there is none."""
    if one.outgoing == other.incoming and one.incoming == other.outgoing:
        return ""
    # Both ranks tell the same.
    if other.rank < one.rank:
        return message_difference(other, one)
    if one.outgoing and other.outgoing and not one.incoming and not other.incoming:
        return (
            f"ranks {one.rank} and {other.rank} both send first, and each send waits for its "
            f"receive; batch them, or use a communicator for each direction:\n"
            f"{orders((one, other))}"
        )
    return (
        f"the messages between ranks {one.rank} and {other.rank} do not match: rank {one.rank} "
        f"{_dealings(one)}, rank {other.rank} {_dealings(other)}:\n{orders((one, other))}"
    )


def _dealings(statement: Statement) -> str:
    sent = ", ".join(statement.outgoing) or "nothing"
    received = ", ".join(statement.incoming) or "nothing"
    return f"sends {sent} and receives {received}"
