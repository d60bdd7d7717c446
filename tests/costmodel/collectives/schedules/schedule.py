"""A collective as a schedule: rounds of messages that say which chunks go from where to where, to
be executed on numbers or timed.

The bytes of a collective (see `collectives`) are cut into `parts` equal chunks. A message carries
whole chunks from one rank to another, which stores them or adds them to its own. A round reads what
the ranks held when it began.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ClusterError

Chunks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`chunks` from `source` to `destination`, which adds them to its own where `reduce` is set."""

    source: int
    destination: int
    chunks: Chunks
    reduce: bool = False


Round = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The messages that `ranks` ranks exchange in a collective of `kind`; the root, where there is
    one, is rank 0.

    `parts`: chunks in the bytes of the collective (0: the messages are empty). `chunks`: all that
    there are, more in an all-to-all, whose bytes are one rank's. A rank numbered `ranks` is the
    switch.
    """

    kind: str
    ranks: int
    parts: int
    chunks: int
    rounds: tuple[Round, ...]

    def nbytes(self, message: Message, total: float) -> float:
        """Bytes of a message in a collective of `total` bytes."""
        return len(message.chunks) * total / self.parts if self.parts else 0.0

    def sent(self, rank: int) -> float:
        """The bytes that a rank sends, as a multiple of the bytes of the collective."""
        return sum(
            self.nbytes(message, 1.0)
            for message in itertools.chain(*self.rounds)
            if message.source == rank
        )


def message(source: int, destination: int, chunks: Iterable[int]) -> Message:
    """A copy of `chunks`."""
    return Message(source=source, destination=destination, chunks=tuple(chunks))


def together(*phases: Sequence[Round]) -> list[Round]:
    """Phases side by side, round by round; messages between the same two ranks become one."""
    return [
        _merged(itertools.chain(*rounds)) for rounds in itertools.zip_longest(*phases, fillvalue=())
    ]


def _merged(messages: Iterable[Message]) -> Round:
    results: dict[tuple[int, int, bool], Chunks] = {}
    for one in messages:
        key = (one.source, one.destination, one.reduce)
        results[key] = results.get(key, ()) + one.chunks
    return tuple(
        Message(source=s, destination=d, chunks=chunks, reduce=reduce)
        for (s, d, reduce), chunks in results.items()
        if chunks
    )


def backwards(rounds: Sequence[Round], *, reduce: bool) -> list[Round]:
    """The rounds in reverse: what spread a chunk over ranks along a tree then collects it, adding
    up where `reduce` is set.
    """
    return [
        tuple(
            replace(one, source=one.destination, destination=one.source, reduce=reduce)
            for one in messages
        )
        for messages in reversed(rounds)
    ]


def _starting(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Which chunks each rank has at the start: pairs (rank, chunk)."""
    everything = range(schedule.chunks)
    match schedule.kind:
        case "broadcast" | "scatter" | "send":
            yield from ((0, chunk) for chunk in everything)
        case "all_gather" | "gather" | "barrier":
            yield from ((_owner(schedule, chunk), chunk) for chunk in everything)
        case "all_to_all":
            yield from ((chunk // schedule.ranks, chunk) for chunk in everything)
        case _:
            yield from itertools.product(range(schedule.ranks), everything)


def _owner(schedule: Schedule, chunk: int) -> int:
    return chunk * schedule.ranks // schedule.chunks


def required(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Which chunks each rank must have at the end, complete: pairs (rank, chunk)."""
    everything = range(schedule.chunks)
    match schedule.kind:
        case "broadcast" | "all_reduce" | "all_gather" | "barrier":
            yield from itertools.product(range(schedule.ranks), everything)
        case "reduce" | "gather":
            yield from ((0, chunk) for chunk in everything)
        case "scatter" | "reduce_scatter":
            yield from ((_owner(schedule, chunk), chunk) for chunk in everything)
        case "all_to_all":
            yield from ((chunk % schedule.ranks, chunk) for chunk in everything)
        case _:
            yield from ((schedule.ranks - 1, chunk) for chunk in everything)


Held = dict[tuple[int, int], NDArray[np.float64]]


def execute(schedule: Schedule, inputs: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    """The buffer of every rank after the schedule, from the buffer of each before it.

    A buffer holds all chunks of the collective (an all-to-all: the chunks of one rank), in order;
    what a rank does not know is NaN.

    >>> from tests.costmodel.collectives.schedules.algorithms import build
    >>> ring = build("all_reduce", "ring", 3)
    >>> [list(map(int, row)) for row in execute(ring, [[2, 4, 6], [1, 2, 3], [4, 8, 12]])]
    [[7, 14, 21], [7, 14, 21], [7, 14, 21]]
    """
    own = max(schedule.parts, 1) if schedule.kind == "all_to_all" else schedule.chunks
    length = len(inputs[0]) if len(inputs) else 0
    if len(inputs) != schedule.ranks or any(len(row) != length for row in inputs) or length % own:
        raise ClusterError(
            f"a {schedule.kind} of {schedule.ranks} ranks takes as many buffers, all of one "
            f"multiple of {own} numbers"
        )
    width = length // own
    rows = np.asarray(inputs, dtype=np.float64).reshape(schedule.ranks, own, width)
    held: Held = {(rank, chunk): rows[rank, chunk % own] for rank, chunk in _starting(schedule)}
    for messages in schedule.rounds:
        _deliver(messages, held)
    out = np.full((schedule.ranks, own, width), np.nan)
    for rank, chunk in required(schedule):
        out[rank, chunk // schedule.ranks if schedule.kind == "all_to_all" else chunk] = held.get(
            (rank, chunk), np.nan
        )
    return list(out.reshape(schedule.ranks, length))


def _deliver(messages: Round, held: Held) -> None:
    arriving = []
    for one in messages:
        for chunk in one.chunks:
            if (one.source, chunk) not in held:
                raise ClusterError(
                    f"rank {one.source} is to send chunk {chunk} to rank {one.destination} before "
                    "it has it"
                )
            arriving.append((one, chunk, held[one.source, chunk]))
    for one, chunk, value in arriving:
        place = one.destination, chunk
        held[place] = held[place] + value if one.reduce and place in held else value
