"""Algorithms that know levels: each device takes outside its branch its own share only; a 2D torus
is two such levels on one kind of link.

On level i with n branches of m members, of p ranks in all:

    all_gather, reduce_scatter   rings: n - 1 steps, traffic (n - 1) / (m n)
    broadcast, reduce            binomial trees among the first of each branch: ceil(log2 n) steps,
                                 traffic ceil(log2 n)
    scatter, gather              binomial trees: ceil(log2 n) steps, traffic (n - 1) m / p
    all_to_all                   pairwise with bundles, the innermost level first: n - 1 steps,
                                 traffic (n - 1) / n
"""

from __future__ import annotations

from dataclasses import replace

from tests.costmodel.collectives.schedules.methods import (
    Cost,
    Costs,
    Method,
    Rounds,
    Shape,
    after,
    back,
    share,
    then,
    without_bytes,
)
from tests.costmodel.collectives.schedules.patterns import log2_up
from tests.costmodel.collectives.schedules.schedule import Round, together

from . import patterns


def _gather(shape: Shape) -> list[Round]:
    """Rings on each level, the outermost first."""
    rounds: list[Round] = []
    for level in reversed(range(len(shape.sizes))):
        unit = shape.inside[level] * shape.sizes[level]
        # So far a rank has the chunks of its own place in every unit of the levels outside.
        phases = [
            patterns.ring_gather(
                line, [tuple(range(rank % unit, shape.ranks, unit)) for rank in line]
            )
            for line in shape.lines(level)
        ]
        rounds += together(*phases)
    return rounds


def _gather_costs(shape: Shape) -> list[Cost]:
    return [
        Cost(steps=n - 1, traffic=share(n) / m, drivers=m)
        for n, m in zip(shape.sizes, shape.inside, strict=True)
    ]


def _broadcast(shape: Shape) -> list[Round]:
    rounds: list[Round] = []
    everything = tuple(range(shape.ranks))
    for level in reversed(range(len(shape.sizes))):
        rounds += together(
            *(
                patterns.binomial_broadcast(line, everything)
                for line in shape.lines(level, leaders=True)
            )
        )
    return rounds


def _broadcast_costs(shape: Shape) -> list[Cost]:
    return [Cost(steps=log2_up(n), traffic=log2_up(n)) for n in shape.sizes]


def _scatter(shape: Shape) -> list[Round]:
    rounds: list[Round] = []
    for level in reversed(range(len(shape.sizes))):
        unit = shape.inside[level]
        phases = [
            patterns.binomial_scatter(line, [tuple(range(rank, rank + unit)) for rank in line])
            for line in shape.lines(level, leaders=True)
        ]
        rounds += together(*phases)
    return rounds


def _scatter_costs(shape: Shape) -> list[Cost]:
    p = shape.ranks
    return [
        Cost(steps=log2_up(n), traffic=(n - 1) * m / p)
        for n, m in zip(shape.sizes, shape.inside, strict=True)
    ]


def _all_to_all(shape: Shape) -> list[Round]:
    """On each level a block goes to the place of its destination; on the levels outside it is still
    at that of its source.
    """
    p = shape.ranks
    rounds: list[Round] = []
    for size, unit in zip(shape.sizes, shape.inside, strict=True):
        whole = unit * size
        blocks: dict[tuple[int, int], list[int]] = {}
        for source in range(p):
            for destination in range(p):
                at = source // unit * unit + destination % unit
                to = source // whole * whole + destination % whole
                blocks.setdefault((at, to), []).append(source * p + destination)
        phases = []
        for line in shape.lines(shape.inside.index(unit)):
            chunks = {
                (i, j): tuple(blocks[a, b]) for i, a in enumerate(line) for j, b in enumerate(line)
            }
            phases.append(patterns.exchange(line, chunks))
        rounds += together(*phases)
    return rounds


def _all_to_all_costs(shape: Shape) -> list[Cost]:
    return [
        Cost(steps=n - 1, traffic=share(n), drivers=m)
        for n, m in zip(shape.sizes, shape.inside, strict=True)
    ]


def _made(rounds: Rounds, costs: Costs, *, empty: bool = False) -> Method:
    return Method(rounds=rounds, costs=costs, levels=True, empty=empty)


HIERARCHICAL: dict[str, Method] = {
    "all_gather": _made(_gather, _gather_costs),
    "reduce_scatter": _made(back(_gather, reduce=True), _gather_costs),
    "all_reduce": _made(
        then(back(_gather, reduce=True), _gather), after(_gather_costs, _gather_costs)
    ),
    "broadcast": _made(_broadcast, _broadcast_costs),
    "reduce": _made(back(_broadcast, reduce=True), _broadcast_costs),
    "scatter": _made(_scatter, _scatter_costs),
    "gather": _made(back(_scatter, reduce=False), _scatter_costs),
    "all_to_all": _made(_all_to_all, _all_to_all_costs),
    "barrier": _made(
        then(back(_scatter, reduce=False), _broadcast),
        without_bytes(after(_scatter_costs, _broadcast_costs)),
        empty=True,
    ),
}


def torus_sides(n: int) -> tuple[int, int]:
    """The sides of the squarest torus of n devices.

    >>> torus_sides(12), torus_sides(7)
    ((4, 3), (7, 1))
    """
    short = max(side for side in range(1, int(n**0.5) + 1) if n % side == 0)
    return n // short, short


def _on_torus(method: Method) -> Method:
    """The two axes of a torus as two levels, whose costs fall on the same links."""

    def torus(shape: Shape) -> Shape:
        return replace(shape, sizes=torus_sides(shape.ranks))

    def costs(shape: Shape) -> list[Cost]:
        rows = method.costs(torus(shape))
        return [
            Cost(steps=sum(row.steps for row in rows), traffic=sum(row.traffic for row in rows))
        ]

    return replace(
        method, rounds=lambda shape: method.rounds(torus(shape)), costs=costs, levels=False
    )


TORUS: dict[str, Method] = {kind: _on_torus(method) for kind, method in HIERARCHICAL.items()}
