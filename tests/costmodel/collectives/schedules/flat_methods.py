"""Algorithms over one level of links: linear, parameter server, trees, recursive doubling, ring,
chain, two trees, in the switch.

What spreads chunks along trees (all-gather, broadcast, scatter), run backwards, collects or adds
them up in the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.costmodel.collectives.schedules.methods import (
    Cost,
    Method,
    Rounds,
    Shape,
    after,
    back,
    flat,
    share,
    then,
    without_bytes,
)
from tests.costmodel.collectives.schedules.patterns import log2_up
from tests.costmodel.collectives.schedules.schedule import (
    Chunks,
    Message,
    Round,
    backwards,
    message,
    together,
)

from . import patterns

Methods = dict[str, Method]


def _own(pattern: Callable[[Sequence[int], list[Chunks]], list[Round]]) -> Rounds:
    """A pattern over all ranks, each with one chunk of its own."""
    return lambda shape: pattern(range(shape.ranks), [(i,) for i in range(shape.ranks)])


def _whole(
    pattern: Callable[[Sequence[int], Chunks], list[Round]], parts: Callable[[Shape], int]
) -> Rounds:
    """A pattern over all ranks that moves the whole buffer."""
    return lambda shape: pattern(range(shape.ranks), tuple(range(parts(shape))))


def _one(shape: Shape) -> int:
    return 1


def _each(shape: Shape) -> int:
    return shape.ranks


def _segments(shape: Shape) -> int:
    return shape.segments


def _halves(shape: Shape) -> int:
    return 2 * shape.segments


def _two_tree(shape: Shape) -> list[Cost]:
    """A round moves 2 of 2c chunks through the fullest port; the last moves one, where a place is
    alone on the lowest level.
    """
    n = shape.ranks - 1
    rounds = shape.segments - 1 + n.bit_length()
    alone = n > 1 and n & (n - 1) == 0
    return flat(rounds, (2 * rounds - alone) / (2 * shape.segments))


def _switch_broadcast(shape: Shape) -> list[Round]:
    """Segment by segment the root's data goes up to the switch, and from there to all while the
    next goes up.
    """
    switch = shape.ranks
    segments = range(shape.segments)
    up: list[Round] = [(message(0, switch, (c,)),) for c in segments]
    down: list[Round] = [
        tuple(message(switch, rank, (c,)) for rank in range(1, shape.ranks)) for c in segments
    ]
    return together(up, [(), *down])


def _switch_gather(shape: Shape) -> list[Round]:
    ranks = range(shape.ranks)
    switch = shape.ranks
    up = tuple(message(rank, switch, (rank,)) for rank in ranks)
    return [up, tuple(message(switch, rank, [c for c in ranks if c != rank]) for rank in ranks)]


def _switch_all_reduce(shape: Shape) -> list[Round]:
    """Four stages a segment: all send it to the switch, which adds up; each gets its share, sends
    it up, and the switch gives it to all.
    """
    p = shape.ranks
    switch = shape.ranks
    rounds = list[list[Round]]()
    for segment in range(shape.segments):
        chunks = tuple(range(segment * p, (segment + 1) * p))
        added = backwards([tuple(message(switch, rank, chunks) for rank in range(p))], reduce=True)
        shares = tuple(message(switch, rank, (chunks[rank],)) for rank in range(p))
        returned = tuple(message(rank, switch, (chunks[rank],)) for rank in range(p))
        everything = tuple(message(switch, rank, chunks) for rank in range(p))
        rounds.append([*[()] * segment, *added, shares, returned, everything])
    return together(*rounds)


def _switch_all_reduce_costs(shape: Shape) -> list[Cost]:
    """While all four stages run, a port carries a segment and a share; in two rounds at each end a
    segment only.
    """
    c = shape.segments
    return flat(c + 3, ((c - 1) * (1 + 1 / shape.ranks) + 4) / c)


def _server_all_reduce(shape: Shape) -> list[Round]:
    """The workers send a segment to the server while it gives them the one before."""
    segments = range(shape.segments)
    up = [tuple(message(0, rank, (c,)) for rank in range(1, shape.ranks)) for c in segments]
    return together(backwards(up[::-1], reduce=True), [(), *up])


def _doubling_all_reduce(shape: Shape) -> list[Round]:
    """In round k partners 2^k apart exchange all they have; ranks beyond a power of two give theirs
    to a partner and get the sum back.
    """
    core = 2 ** (shape.ranks.bit_length() - 1)
    extra = range(core, shape.ranks)
    into: list[Round] = (
        [tuple(Message(source=r, destination=r - core, chunks=(0,), reduce=True) for r in extra)]
        if extra
        else []
    )
    exchanges = [
        tuple(
            Message(source=rank, destination=rank ^ 2**k, chunks=(0,), reduce=True)
            for rank in range(core)
        )
        for k in range(core.bit_length() - 1)
    ]
    return [*into, *exchanges, *backwards(into, reduce=False)]


def _doubling_costs(shape: Shape) -> list[Cost]:
    beyond = shape.ranks & (shape.ranks - 1) != 0
    rounds = shape.ranks.bit_length() - 1 + 2 * beyond
    return flat(rounds, rounds)


_BACKWARDS = {"ring": "ring", "recursive_doubling": "recursive_halving"}
"""What an all-gather is called when it runs backwards."""
GATHER: Methods = {
    "ring": Method(
        rounds=_own(patterns.ring_gather), costs=lambda s: flat(s.ranks - 1, share(s.ranks))
    ),
    "recursive_doubling": Method(
        rounds=_own(patterns.doubling_gather),
        costs=lambda s: flat(log2_up(s.ranks), share(s.ranks)),
    ),
}
SCATTER: Methods = {
    "linear": Method(
        rounds=_own(patterns.linear_scatter), costs=lambda s: flat(s.ranks - 1, share(s.ranks))
    ),
    "parameter_server": Method(
        rounds=_own(patterns.direct_scatter), costs=lambda s: flat(1, share(s.ranks))
    ),
    "binomial_tree": Method(
        rounds=_own(patterns.binomial_scatter),
        costs=lambda s: flat(log2_up(s.ranks), share(s.ranks)),
    ),
}
_TREES: dict[
    str, tuple[Callable[[Sequence[int], Chunks], list[Round]], Callable[[Shape], list[Cost]]]
] = {
    "linear": (patterns.linear_broadcast, lambda s: flat(s.ranks - 1, s.ranks - 1)),
    "parameter_server": (patterns.direct_broadcast, lambda s: flat(1, s.ranks - 1)),
    "binomial_tree": (
        patterns.binomial_broadcast,
        lambda s: flat(log2_up(s.ranks), log2_up(s.ranks)),
    ),
}


def _chain(shape: Shape) -> list[Cost]:
    rounds = shape.segments + shape.ranks - 2
    return flat(rounds, rounds / shape.segments)


BROADCAST: Methods = {
    **{
        name: Method(rounds=_whole(pattern, _one), costs=costs, parts=_one)
        for name, (pattern, costs) in _TREES.items()
    },
    "chain": Method(
        rounds=_whole(patterns.chain_broadcast, _segments), costs=_chain, parts=_segments
    ),
    "two_tree": Method(
        rounds=_whole(patterns.two_tree_broadcast, _halves), costs=_two_tree, parts=_halves
    ),
    "in_switch": Method(
        rounds=_switch_broadcast,
        costs=lambda s: flat(s.segments + 1, (s.segments + 1) / s.segments),
        parts=_segments,
    ),
}
REDUCE: Methods = {
    name: Method(rounds=back(m.rounds, reduce=True), costs=m.costs, parts=m.parts)
    for name, m in BROADCAST.items()
}
for _name, _gather in GATHER.items():  # a scatter and a gather of the parts (van de Geijn)
    _spread = SCATTER["binomial_tree"]
    BROADCAST[_name] = Method(
        rounds=then(_spread.rounds, _gather.rounds), costs=after(_spread.costs, _gather.costs)
    )
    REDUCE[_BACKWARDS[_name]] = Method(
        rounds=then(back(_gather.rounds, reduce=True), back(_spread.rounds, reduce=False)),
        costs=after(_gather.costs, _spread.costs),
    )
ALL_GATHER: Methods = {
    **GATHER,
    "in_switch": Method(rounds=_switch_gather, costs=lambda s: flat(2, 1)),
}
REDUCE_SCATTER: Methods = {
    _BACKWARDS.get(name, name): Method(rounds=back(m.rounds, reduce=True), costs=m.costs)
    for name, m in ALL_GATHER.items()
}
for _name, (_pattern, _costs) in _TREES.items():  # through the root
    _spread = SCATTER[_name]
    _all = _whole(_pattern, _each)
    _both = after(_spread.costs, _costs)
    ALL_GATHER[_name] = Method(rounds=then(back(_spread.rounds, reduce=False), _all), costs=_both)
    REDUCE_SCATTER[_name] = Method(
        rounds=then(back(_all, reduce=True), _spread.rounds), costs=_both
    )
ALL_REDUCE: Methods = {
    name: Method(
        rounds=then(REDUCE[name].rounds, m.rounds), costs=after(m.costs, m.costs), parts=m.parts
    )
    for name, m in BROADCAST.items()
    if name in ("linear", "binomial_tree", "chain", "two_tree")
}
for _name, _gather in GATHER.items():  # Rabenseifner, and the ring of Patarasuk and Yuan
    _first = REDUCE_SCATTER[_BACKWARDS[_name]]
    ALL_REDUCE[_BACKWARDS[_name]] = Method(
        rounds=then(_first.rounds, _gather.rounds), costs=after(_first.costs, _gather.costs)
    )
ALL_REDUCE["recursive_doubling"] = Method(
    rounds=_doubling_all_reduce, costs=_doubling_costs, parts=_one
)
ALL_REDUCE["in_switch"] = Method(
    rounds=_switch_all_reduce, costs=_switch_all_reduce_costs, parts=lambda s: s.ranks * s.segments
)
ALL_REDUCE["parameter_server"] = Method(
    rounds=_server_all_reduce,
    costs=lambda s: flat(s.segments + 1, (s.segments + 1) / s.segments * (s.ranks - 1)),
    parts=_segments,
)


def _blocks(n: int) -> dict[tuple[int, int], Chunks]:
    """Chunk n i + j goes from i to j."""
    return {(i, j): (n * i + j,) for i in range(n) for j in range(n)}


def _exchange(
    pattern: Callable[[Sequence[int], dict[tuple[int, int], Chunks]], list[Round]],
) -> Rounds:
    return lambda shape: pattern(range(shape.ranks), _blocks(shape.ranks))


def _bruck_costs(shape: Shape) -> list[Cost]:
    n = shape.ranks
    moved = sum(d >> k & 1 for k in range(log2_up(n)) for d in range(n))
    return flat(log2_up(n), moved / n)


ALL_TO_ALL: Methods = {
    "linear": Method(
        rounds=_exchange(patterns.direct_exchange), costs=lambda s: flat(1, share(s.ranks))
    ),
    "pairwise": Method(
        rounds=_exchange(patterns.exchange), costs=lambda s: flat(s.ranks - 1, share(s.ranks))
    ),
    "bruck": Method(rounds=_exchange(patterns.bruck_exchange), costs=_bruck_costs),
}
SEND: Methods = {
    "message": Method(
        rounds=lambda s: [(message(0, s.ranks - 1, (0,)),)], costs=lambda s: flat(1, 1), parts=_one
    )
}
BARRIER: Methods = {
    "dissemination": Method(
        rounds=GATHER["recursive_doubling"].rounds,
        costs=lambda s: flat(log2_up(s.ranks), 0),
        empty=True,
    ),
    "in_switch": Method(rounds=_switch_gather, costs=lambda s: flat(2, 0), empty=True),
}
for _name in ("linear", "parameter_server", "binomial_tree"):
    BARRIER[_name] = Method(
        rounds=ALL_GATHER[_name].rounds, costs=without_bytes(ALL_GATHER[_name].costs), empty=True
    )
