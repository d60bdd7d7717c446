"""Every collective by every algorithm: its schedule, the closed form of its time, and the fastest
one by size and topology.

    time = sum over levels of steps * latency + traffic * bytes / rate

with p ranks, c segments, l = ceil(log2 p) and q = (p - 1) / p:

    steps, traffic      all_gather, reduce_scatter   broadcast, reduce      scatter, gather
                        all_reduce
    linear              2(p-1), q + p-1              p-1, p-1               p-1, q
                        2(p-1), 2(p-1)
    parameter_server    2, q + p-1                   1, p-1                 1, q              c+1,
                        (p-1)(c+1)/c
    binomial_tree       2l, q + l                    l, l                   l, q              2l, 2l
    recursive_doubling  l, q (all_gather)            2l, 2q (broadcast)
                        l, l (2 more beyond a power of two)
    recursive_halving   l, q (reduce_scatter)        2l, 2q (reduce)                          2l, 2q
    ring                p-1, q                       l+p-1, 2q
                        2(p-1), 2q
    chain                                            c+p-2, (c+p-2)/c                         twice
    a broadcast
    two_tree                                         about c+l, 1+l/c                         twice
    a broadcast
    in_switch           2, 1                         c+1, (c+1)/c                             c+3,
                        ((c-1)(1+1/p) + 4)/c
    torus, hierarchical see `level_methods`

    all_to_all   linear 1, q; pairwise p-1, q; bruck l, about l/2
    barrier      no bytes: dissemination l, binomial_tree 2l, linear 2(p-1), parameter_server 2,
                 in_switch 2

Sources: Thakur, Rabenseifner, Gropp 2005 (trees, recursive doubling and halving, pairwise); Bruck
et al. 1997; Patarasuk, Yuan 2009 (ring); Sanders, Speck, Träff 2009 (two trees); Mikami et al. 2018
(torus); Li et al. 2014 (parameter server); Graham et al. 2016 (in-switch).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from autopar.errors import ClusterError, unknown
from tests.costmodel.collectives.schedules.methods import SEGMENTS, Cost, Method, Shape, back
from tests.costmodel.collectives.schedules.schedule import Schedule
from tests.costmodel.collectives.schedules.simulator import Link

from . import flat_methods, level_methods

METHODS: Mapping[str, Mapping[str, Method]] = {
    kind: {
        **flat,
        **({"torus": level_methods.TORUS[kind]} if kind in level_methods.TORUS else {}),
        **(
            {"hierarchical": level_methods.HIERARCHICAL[kind]}
            if kind in level_methods.HIERARCHICAL
            else {}
        ),
    }
    for kind, flat in {
        "all_reduce": flat_methods.ALL_REDUCE,
        "all_gather": flat_methods.ALL_GATHER,
        "reduce_scatter": flat_methods.REDUCE_SCATTER,
        "all_to_all": flat_methods.ALL_TO_ALL,
        "broadcast": flat_methods.BROADCAST,
        "reduce": flat_methods.REDUCE,
        "gather": {
            name: Method(rounds=back(method.rounds, reduce=False), costs=method.costs)
            for name, method in flat_methods.SCATTER.items()
        },
        "scatter": flat_methods.SCATTER,
        "send": flat_methods.SEND,
        "barrier": flat_methods.BARRIER,
    }.items()
}


AT_ONCE = {("all_to_all", "linear"), *((kind, "parameter_server") for kind in METHODS)}
"""What sends or receives many messages in one step."""


def method(kind: str, algorithm: str) -> Method:
    """The method of that name; an unknown one is an error that lists the valid names."""
    if kind not in METHODS:
        raise ClusterError(unknown("collective", kind, METHODS))
    if algorithm not in METHODS[kind]:
        raise ClusterError(unknown(f"algorithm of {kind}", algorithm, METHODS[kind]))
    return METHODS[kind][algorithm]


def _shape(ranks: int | Sequence[int], segments: int) -> Shape:
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not sizes or min(sizes) < 1 or segments < 3:
        raise ClusterError(
            f"a group of {sizes} ranks in {segments} segments: it takes at least one rank a level, "
            "and 3 segments"
        )
    return Shape(sizes=sizes, segments=segments)


def build(
    kind: str, algorithm: str, ranks: int | Sequence[int], *, segments: int = SEGMENTS
) -> Schedule:
    """The schedule of a collective among `ranks`, or over levels of that many branches each, from
    the inside out.
    """
    schedule = method(kind, algorithm)
    shape = _shape(ranks, segments)
    parts = schedule.parts(shape)
    return Schedule(
        kind=kind,
        ranks=shape.ranks,
        parts=0 if schedule.empty else parts,
        chunks=parts * (shape.ranks if kind == "all_to_all" else 1),
        rounds=tuple(schedule.rounds(shape)) if shape.ranks > 1 else (),
    )


def costs(
    kind: str, algorithm: str, ranks: int | Sequence[int], *, segments: int = SEGMENTS
) -> tuple[Cost, ...]:
    """Steps and traffic on each level. One that does not know levels has them all on one."""
    schedule = method(kind, algorithm)
    shape = _shape(ranks, segments)
    if shape.ranks == 1:
        return tuple(Cost(steps=0, traffic=0) for _ in shape.sizes)
    return tuple(
        schedule.costs(shape if schedule.levels else Shape(sizes=(shape.ranks,), segments=segments))
    )


def seconds(
    kind: str,
    algorithm: str,
    nbytes: float,
    sizes: Sequence[int],
    links: Sequence[Link],
    *,
    segments: int = SEGMENTS,
) -> float:
    """The closed form, over levels of `sizes` branches; one that does not know levels takes a
    single one.
    """
    rows = costs(kind, algorithm, tuple(sizes), segments=segments)
    if len(rows) != len(links):
        raise ClusterError(f"{algorithm} runs over one level of links, not {len(links)}")
    return sum(
        cost.steps * link.latency
        + cost.traffic * nbytes * max(1, min(link.shared_by, cost.drivers)) / link.rate
        for cost, link in zip(rows, links, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def fastest(
    kind: str,
    nbytes: float,
    sizes: tuple[int, ...],
    links: tuple[Link, ...],
    *,
    switch: bool = False,
) -> tuple[str, int, float]:
    """The algorithm of least time, its number of segments and its seconds; `switch`: the innermost
    switch can add up.

    Those that send to many at once are not taken: what a port spends on each of many messages is
    not in the model.

    >>> inside, outside = Link(latency=3e-6, rate=3e11), Link(latency=1e-5, rate=2.5e10) >>>
    fastest("all_reduce", 1e3, (8,), (inside,))[0], fastest("all_reduce", 1e9, (8,), (inside,))[0]
    ('recursive_doubling', 'recursive_halving') >>> fastest("all_reduce", 1e9, (8, 4), (inside,
    outside))[0] 'hierarchical'
    """
    if kind not in METHODS:
        raise ClusterError(unknown("collective", kind, METHODS))
    results = []
    for algorithm, one in METHODS[kind].items():
        if (
            (kind, algorithm) in AT_ONCE
            or (algorithm == "in_switch" and not switch)
            or (len(links) > 1 and not one.levels)
        ):
            continue
        pipelined = algorithm in ("chain", "two_tree", "in_switch")
        for segments in (3, 8, 32, 128, 512) if pipelined else (SEGMENTS,):
            results.append(
                (
                    seconds(kind, algorithm, nbytes, sizes, links, segments=segments),
                    algorithm,
                    segments,
                )
            )
    best, algorithm, segments = min(results)
    return algorithm, segments, best
