"""Seconds in which the rows of tokens travel to the ranks of their experts, and back.

Three dispatchers bring a token with k experts, of which R ranks and N nodes have some, on average:

    alltoall   k rows, each by itself, in an all-to-all
    rank       a row to each of the R ranks, in an all-to-all
    node       a row over the network to each of the N nodes, and inside them to each of the R
               ranks over the inner link, by kernels of their own (DeepEP, HybridEP)

The kernels of the last move T tokens with rows of w bytes on S multiprocessors. In a group of n
ranks of one node, and of n ranks of each of m nodes, they take

    overhead + max(T (token + w / once + R w / copy) / S,  T R (n - 1) / n  w / (LINK link))
    overhead + max(T R w / (forward S),                    T N (m - 1) / m  w / (NETWORK network))

Fitted to measured kernels of DeepEP (`benchmarks/fit_dispatch.py`): the upper line to 8 GPUs of
H100, H200, B200 and B300, the lower one to 2 and 4 nodes of 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costmodel.cluster.axis_binding import parse_span
from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.collectives import collective_time

DISPATCHERS: Mapping[str, str] = {
    "alltoall": "each row of a token by itself",
    "rank": "a token once to each rank that has experts of it",
    "node": "a token once to each node that has experts of it, and fanned out inside",
}
SMS = 20
"""Multiprocessors of DeepEP's kernels, as Megatron-Core sets them (--moe-deepep-num-sms)."""
LINK = 0.65
"""The share of an inner link's bandwidth that the kernels reach at most."""
NETWORK = 0.94
"""The share of a port's bandwidth that they reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Constants of a kernel: seconds, and B/s of one multiprocessor.

    `overhead`, `across`: of a call inside a node and between nodes. `token`: of a token on a
    multiprocessor. `once`, `copy`, `forward`: as above.
    """

    overhead: float
    across: float
    token: float
    once: float
    copy: float
    forward: float


KERNELS: Mapping[str, Kernel] = {
    "dispatch": Kernel(
        overhead=3.5e-5,
        across=7.9e-5,
        token=4.3e-7,
        once=float("inf"),
        copy=2.03e10,
        forward=1.16e10,
    ),
    "combine": Kernel(
        overhead=4.4e-5, across=1.4e-4, token=3.7e-7, once=1.39e10, copy=3.00e10, forward=9.4e9
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """Rows that a rank sends.

    `tokens`: of a rank. `nbytes`: of a row. `each`: rows of a token, one for each of its experts.
    `ranks`, `nodes`: the number of them that have experts of a token.
    """

    tokens: float
    nbytes: float
    each: float
    ranks: float
    nodes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatcher:
    """A dispatcher of `DISPATCHERS`; `sms`: multiprocessors of its own kernels, if it has any."""

    name: str
    sms: int = SMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks that split the experts: their number, and the levels that they span."""

    size: int
    level: str
    cluster: Cluster

    @property
    def nodes(self) -> int:
        """The number of nodes over which they lie."""
        spans = parse_span(self.cluster, self.level, self.size)
        within = spans[0][1] if spans and spans[0][0] is self.cluster.levels[0] else 1
        return self.size // within


def travel_seconds(dispatcher: Dispatcher, way: str, travel: Travel, group: Group) -> float:
    """Return the seconds of one way, `dispatch` or `combine`, of a rank's rows."""
    if group.size == 1:
        return 0.0
    if dispatcher.name == "node":
        return _by_kernels(dispatcher.sms, KERNELS[way], travel, group)
    # A token does not go to more ranks than it has experts.
    rows = travel.each if dispatcher.name == "alltoall" else min(travel.ranks, travel.each)
    nbytes = travel.tokens * rows * travel.nbytes
    return float(
        collective_time("all_to_all", nbytes, group.size, level=group.level, cluster=group.cluster)
    )


def _by_kernels(sms: int, kernel: Kernel, travel: Travel, group: Group) -> float:
    sent = travel.tokens * travel.nbytes
    nodes = group.nodes
    if nodes == 1:
        # A rank reads a token once, and writes it to every rank that has experts of it.
        row = travel.nbytes * (1 / kernel.once + travel.ranks / kernel.copy)
        link = LINK * group.cluster.levels[0].rate(group.size, 1.0)
        return kernel.overhead + max(
            travel.tokens * (kernel.token + row) / sms,
            sent * travel.ranks * (group.size - 1) / group.size / link,
        )
    # Each device sends by its own port to the devices in its place on other nodes.
    port = group.cluster.levels[-1]
    network = NETWORK * port.rate(nodes, 1.0) / port.shared_by
    return kernel.across + max(
        sent * travel.ranks / (kernel.forward * sms),
        sent * travel.nodes * (nodes - 1) / nodes / network,
    )
