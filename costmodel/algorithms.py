"""Every collective by every algorithm: its schedule, and the closed form of its time.

    time = sum over levels of steps * latency + traffic * bytes / rate          p ranks, B bytes, c segments, l = ceil(log2 p)

                            all_gather, reduce_scatter    broadcast, reduce         scatter, gather     all_reduce
    linear                  p-1, scatter + broadcast      p-1, p-1                  p-1, (p-1)/p        2(p-1), 2(p-1)
    parameter server        -                             1, p-1                    1, (p-1)/p          2, 2(p-1)
    binomial tree           scatter + broadcast           l, l                      l, (p-1)/p          2l, 2l
    recursive doubling      l, (p-1)/p                    2l, 2(p-1)/p              -                   2l, 2(p-1)/p
    ring                    p-1, (p-1)/p                  l+p-1, 2(p-1)/p           -                   2(p-1), 2(p-1)/p
    chain                   -                             c+p-2, (c+p-2)/c          -                   2(c+p-2), 2(c+p-2)/c
    two-tree                -                             s, see `_two_tree`        -                   twice
    in-switch               2, 1                          c+1, (c+1)/c              -                   c+3, 1+1/p for many c
    torus (a x b)           a+b-2, (p-1)/p                                          l(a)+l(b), (p-1)/p  2(a+b-2), 2(p-1)/p
    hierarchical            ring (tree) in each level: on level i of n members, with m inside and M = m n: n-1, (n-1)m/p

    all_to_all: pairwise p-1, (p-1)/p; direct 1, (p-1)/p; Bruck l, sum of its rounds; torus and hierarchical a-1 + b-1, (a-1)/a + (b-1)/b
    barrier: empty messages: dissemination l, binomial tree 2l, linear 2(p-1), parameter server 2, in-switch 2

Sources: Thakur, Rabenseifner, Gropp 2005 (trees, recursive doubling, ring, pairwise); Bruck et al. 1997; Patarasuk, Yuan 2009 (ring);
Sanders, Speck, Träff 2009 (two trees); Mikami et al. 2018 (torus); Li et al. 2014 (parameter server); Graham et al. 2016 (in the switch).
What spreads chunks along trees, run backwards, collects or adds them up in the same time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ClusterError, unknown

from . import patterns
from .patterns import log2_up
from .schedules import Chunks, Message, Round, Schedule, backwards, message, together

KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send", "barrier",
)  # fmt: skip
SEGMENTS = 8
REVERSED = {"reduce": "broadcast", "reduce_scatter": "all_gather", "gather": "scatter"}
"""Collectives that are another one backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The group: branches on each level from the inside out, and into how many segments pipelined algorithms cut the bytes."""

    sizes: tuple[int, ...]
    segments: int = SEGMENTS

    @property
    def ranks(self) -> int:
        """Members of the group."""
        return math.prod(self.sizes)

    @property
    def inside(self) -> tuple[int, ...]:
        """Members inside one branch of each level."""
        return tuple(itertools.accumulate(self.sizes[:-1], lambda a, b: a * b, initial=1))

    def lines(self, level: int, leaders: bool = False) -> list[list[int]]:
        """The ranks that differ on one level only; `leaders`: only those that are first on all levels inside it."""
        unit, size = self.inside[level], self.sizes[level]
        starts = [rank for rank in range(self.ranks) if rank // unit % size == 0 and not (leaders and rank % unit)]
        return [[start + unit * i for i in range(size)] for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """On one level: steps, traffic as a multiple of the bytes, and members of a branch below that drive it at once."""

    steps: float
    traffic: float
    drivers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One algorithm for one collective: rounds and chunks (in the bytes, in all) of a group, and its costs, a level each."""

    rounds: Callable[[Shape], list[Round]]
    costs: Callable[[Shape], list[Cost]]
    parts: Callable[[Shape], int] = lambda shape: shape.ranks
    levels: bool = False
    """Whether it knows levels; the others run over one."""


def _flat(steps: float, traffic: float) -> list[Cost]:
    return [Cost(steps=steps, traffic=traffic)]


def _share(n: int) -> float:
    return (n - 1) / n


def _own(n: int) -> list[Chunks]:
    return [(i,) for i in range(n)]


def _after(*parts: Callable[[Shape], list[Cost]]) -> Callable[[Shape], list[Cost]]:
    """The costs of one after the other."""

    def costs(shape: Shape) -> list[Cost]:
        rows = zip(*(part(shape) for part in parts), strict=True)
        return [Cost(steps=sum(c.steps for c in row), traffic=sum(c.traffic for c in row), drivers=row[0].drivers) for row in rows]

    return costs


def _then(*parts: Callable[[Shape], list[Round]]) -> Callable[[Shape], list[Round]]:
    """The rounds of one after the other."""
    return lambda shape: [messages for part in parts for messages in part(shape)]


def _back(rounds: Callable[[Shape], list[Round]], *, reduce: bool) -> Callable[[Shape], list[Round]]:
    return lambda shape: backwards(rounds(shape), reduce=reduce)


def _on_ranks(pattern: Callable[[Sequence[int], list[Chunks]], list[Round]]) -> Callable[[Shape], list[Round]]:
    """A pattern over all ranks, each of which has one chunk."""
    return lambda shape: pattern(range(shape.ranks), _own(shape.ranks))


def _whole(pattern: Callable[[Sequence[int], Chunks], list[Round]], parts: Callable[[Shape], int]) -> Callable[[Shape], list[Round]]:
    """A pattern over all ranks that moves the whole buffer."""
    return lambda shape: pattern(range(shape.ranks), tuple(range(parts(shape))))


# --- spreading: all_gather, broadcast, scatter

_GATHER: dict[str, Method] = {
    "ring": Method(rounds=_on_ranks(patterns.ring_gather), costs=lambda s: _flat(s.ranks - 1, _share(s.ranks))),
    "recursive_doubling": Method(
        rounds=_on_ranks(patterns.doubling_gather), costs=lambda s: _flat(log2_up(s.ranks), _share(s.ranks))
    ),
}
_SCATTER: dict[str, Method] = {
    "linear": Method(rounds=_on_ranks(patterns.linear_scatter), costs=lambda s: _flat(s.ranks - 1, _share(s.ranks))),
    "parameter_server": Method(rounds=_on_ranks(patterns.direct_scatter), costs=lambda s: _flat(1, _share(s.ranks))),
    "binomial_tree": Method(
        rounds=_on_ranks(patterns.binomial_scatter), costs=lambda s: _flat(log2_up(s.ranks), _share(s.ranks))
    ),
}


def _one(shape: Shape) -> int:
    return 1


def _segments(shape: Shape) -> int:
    return shape.segments


def _twice(shape: Shape) -> int:
    return 2 * shape.segments


def _two_tree(shape: Shape) -> list[Cost]:
    """A round moves 2 of 2c chunks through the fullest port; the last only one, where one place is alone on the lowest level."""
    n = shape.ranks - 1
    rounds = shape.segments - 1 + n.bit_length()
    alone = n > 1 and n & (n - 1) == 0
    return _flat(rounds, (2 * rounds - alone) / (2 * shape.segments))


def _switch_down(shape: Shape) -> list[Round]:
    """Segment by segment the root's data goes up to the switch and from there to all."""
    switch, ranks = shape.ranks, range(shape.ranks)
    up: list[Round] = [(message(0, switch, (c,)),) for c in range(shape.segments)]
    down = [tuple(message(switch, rank, (c,)) for rank in ranks[1:]) for c in range(shape.segments)]
    return together(up, [(), *down])


def _switch_gather(shape: Shape) -> list[Round]:
    ranks = range(shape.ranks)
    up = tuple(message(rank, shape.ranks, (rank,)) for rank in ranks)
    return [up, tuple(message(shape.ranks, rank, (c for c in ranks if c != rank)) for rank in ranks)]


_BROADCAST: dict[str, Method] = {
    "linear": Method(rounds=_whole(patterns.linear_broadcast, _one), costs=lambda s: _flat(s.ranks - 1, s.ranks - 1), parts=_one),
    "parameter_server": Method(rounds=_whole(patterns.direct_broadcast, _one), costs=lambda s: _flat(1, s.ranks - 1), parts=_one),
    "binomial_tree": Method(
        rounds=_whole(patterns.binomial_broadcast, _one), costs=lambda s: _flat(log2_up(s.ranks), log2_up(s.ranks)), parts=_one
    ),
    "chain": Method(
        rounds=_whole(patterns.chain_broadcast, _segments),
        costs=lambda s: _flat(s.segments + s.ranks - 2, (s.segments + s.ranks - 2) / s.segments),
        parts=_segments,
    ),
    "two_tree": Method(rounds=_whole(patterns.two_tree_broadcast, _twice), costs=_two_tree, parts=_twice),
    "in_switch": Method(rounds=_switch_down, costs=lambda s: _flat(s.segments + 1, (s.segments + 1) / s.segments), parts=_segments),
}
for _name in ("ring", "recursive_doubling"):  # van de Geijn: scatter, then gather
    _BROADCAST[_name] = Method(
        rounds=_then(_SCATTER["binomial_tree"].rounds, _GATHER[_name].rounds),
        costs=_after(_SCATTER["binomial_tree"].costs, _GATHER[_name].costs),
    )


# --- several levels, or the two axes of a torus


def _nested_gather(shape: Shape) -> list[Round]:
    """Rings on each level, the outermost first: a device takes outside its own share only, and inside what it got there."""
    rounds: list[Round] = []
    for level in reversed(range(len(shape.sizes))):
        unit = shape.inside[level] * shape.sizes[level]
        held = {rank: tuple(range(rank % unit, shape.ranks, unit)) for rank in range(shape.ranks)}
        # What the members of a line have so far: their chunk of every branch of the levels outside.
        phases = [patterns.ring_gather(line, [_of(shape, level, rank, held) for rank in line]) for line in shape.lines(level)]
        rounds += together(*phases)
    return rounds


def _of(shape: Shape, level: int, rank: int, held: Mapping[int, Chunks]) -> Chunks:
    """What a rank holds before its level gathers: the chunks of its own place, of every branch outside."""
    return held[rank]


def _nested_costs(shape: Shape) -> list[Cost]:
    """On a level of n branches, with m members in each: n - 1 steps, (n - 1) m' of p chunks, where M' chunks came from outside."""
    p = shape.ranks
    return [
        Cost(steps=n - 1, traffic=(n - 1) / (unit * n), drivers=unit) for n, unit in zip(shape.sizes, shape.inside, strict=True)
    ] if p else []
