"""Methods of collectives as textbooks name them: steps, and bytes through the busiest port.

With p ranks, l = ceil(log2 p) and q = (p - 1) / p, as multiples of the collective's bytes:

                     all_reduce          all_gather,        broadcast,      gather,
                                         reduce_scatter     reduce          scatter
    naive            2(p-1), 2(p-1)      2(p-1), q+p-1      p-1, p-1        p-1, q
    parameter_server 2, 2(p-1)           2, q+p-1           1, p-1          1, q
    binomial_tree    2l, 2l              2l, q+l            l, l            l, q
    hypercube        l, l (2 more beyond a power of two)    l, q
    halving          2l, 2q
    ring             2(p-1), 2q          p-1, q
    torus            2(a+b-2), 2q        a+b-2, q
    chain            2(p-1), 2                           p-1, 1
    two_tree         2l, 2                               l, 1
    in_switch        4, 1+1/p            2, 1            2, 1

and of an all-to-all: naive 1, q; pairwise p-1, q; bruck l, about l/2. A torus has a rows of b
ranks, a b = p, as square as p allows. Chain, two trees and the switch stream the buffer in small
segments, so that each latency passes once. Sources: Thakur, Rabenseifner, Gropp 2005; Bruck et al.
1997; Patarasuk, Yuan 2009; Li et al. 2014 (parameter server); Mikami et al. 2018 (torus); Sanders,
Speck, Träff 2009 (two trees); Graham et al. 2016 (in the switch). What backends run is in
`backends`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from autopar.costmodel.cluster.axis_binding import bind_axes, parse_span
from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.measured_collectives import Line
from autopar.errors import ClusterError, unknown

from .algorithm import Algorithm, log2_up, share
from .algorithm_lines import parts_of, plain_line


def _doubling(n: int) -> int:
    """Rounds of recursive doubling: ranks beyond a power of two hand theirs in, and are told."""
    # Pairs exchange everything in each round, so only a power of two comes out even.
    power = n.bit_length() - 1
    return power if n == 1 << power else power + 2


def _bruck(n: int) -> float:
    # In round k the blocks travel whose distance has bit k.
    return sum(d >> k & 1 for k in range(log2_up(n)) for d in range(n)) / n


def sides(n: int) -> tuple[int, int]:
    """The sides of a torus of n ranks, as square as n allows.

    >>> sides(16), sides(8), sides(7)
    ((4, 4), (2, 4), (1, 7))
    """
    rows = max(side for side in range(1, math.isqrt(n) + 1) if n % side == 0)
    return rows, n // rows


def _around(n: int) -> int:
    """Steps around the rings of a torus, first along a row and then along a column."""
    return sum(sides(n)) - 2


TERMS: Mapping[str, Callable[[int], float]] = {
    "1": lambda n: 1,
    "2": lambda n: 2,
    "4": lambda n: 4,
    "1 + 1 / p": lambda n: 1 + 1 / n,
    "p - 1": lambda n: n - 1,
    "2 (p - 1)": lambda n: 2 * (n - 1),
    "l": log2_up,
    "2 l": lambda n: 2 * log2_up(n),
    "d": _doubling,
    "q": share,
    "2 q": lambda n: 2 * share(n),
    "q + p - 1": lambda n: share(n) + n - 1,
    "q + l": lambda n: share(n) + log2_up(n),
    "w": _bruck,
    "a + b - 2": _around,
    "2 (a + b - 2)": lambda n: 2 * _around(n),
}
"""The terms of closed forms.

d: l, or two more than that of the power of two below p; w: the traffic of bruck, about l / 2; a, b:
the sides of a torus.
"""
# The whole buffer goes over every edge of a broadcast; a reduction is one run backwards.
_SPREAD = {
    "naive": ("p - 1", "p - 1"),
    "parameter_server": ("1", "p - 1"),
    "binomial_tree": ("l", "l"),
    "chain": ("p - 1", "1"),
    "two_tree": ("l", "1"),
    "in_switch": ("2", "1"),
}
# Each rank's own part stays where it is, so that q of the bytes passes the root's port.
_PARTED = {"naive": ("p - 1", "q"), "parameter_server": ("1", "q"), "binomial_tree": ("l", "q")}
# Without a round of their own, a root collects all parts first and then tells everybody.
_TO_ALL = {
    "naive": ("2 (p - 1)", "q + p - 1"),
    "parameter_server": ("2", "q + p - 1"),
    "binomial_tree": ("2 l", "q + l"),
    "hypercube": ("l", "q"),
    "ring": ("p - 1", "q"),
    "torus": ("a + b - 2", "q"),
    "in_switch": ("2", "1"),
}
METHODS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "all_reduce": {
        "naive": ("2 (p - 1)", "2 (p - 1)"),
        "parameter_server": ("2", "2 (p - 1)"),
        "binomial_tree": ("2 l", "2 l"),
        "hypercube": ("d", "d"),
        "halving": ("2 l", "2 q"),
        "ring": ("2 (p - 1)", "2 q"),
        "torus": ("2 (a + b - 2)", "2 q"),
        "chain": ("2 (p - 1)", "2"),
        "two_tree": ("2 l", "2"),
        "in_switch": ("4", "1 + 1 / p"),
    },
    "all_gather": _TO_ALL,
    "reduce_scatter": _TO_ALL,
    "all_to_all": {"naive": ("1", "q"), "pairwise": ("p - 1", "q"), "bruck": ("l", "w")},
    "broadcast": _SPREAD,
    "reduce": _SPREAD,
    "gather": _PARTED,
    "scatter": _PARTED,
}
"""The terms of steps and of traffic, by collective and method."""
NAMES = tuple(dict.fromkeys(name for methods in METHODS.values() for name in methods))


@functools.lru_cache(maxsize=1024)
def method_of(kind: str, name: str) -> Algorithm:
    """The method of that name for a collective; an unknown one lists the valid ones."""
    if kind not in METHODS:
        raise ClusterError(unknown("collective", kind, METHODS))
    if name not in METHODS[kind]:
        raise ClusterError(unknown(f"method of {kind}", name, METHODS[kind]))
    # A textbook's method knows no levels: all of it runs at the pace of the slowest.
    steps, traffic = METHODS[kind][name]
    return Algorithm(name=name, layout="flat", steps=TERMS[steps], traffic=TERMS[traffic])


def method_line(kind: str, name: str, cluster: Cluster) -> Line:
    """Seconds, and seconds per byte, of a method among all devices of a cluster.

    Every level carries all steps of those that do not know levels, at its slowest.
    """
    levels = bind_axes(cluster, (cluster.devices,))
    assert levels is not None
    parts = parts_of(cluster, parse_span(cluster, levels[0], cluster.devices))
    # NCCL has its protocols for its own algorithms, which these are not.
    start, each = plain_line(method_of(kind, name), parts)
    return cluster.device.launch + start, each
