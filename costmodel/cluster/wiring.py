"""`Wiring`: devices or units that no switch joins, and their links' rates, by graph algorithms.

Each of n devices has one of n parts of a buffer. Links carry the same both ways; a device's links
have its `bandwidth` together. The graph is networkx's.

- All-gather, and reduce-scatter backwards: no schedule is faster than the narrowest cut, and some
  schedule is as fast (Edmonds 1973; Zhao et al. 2024, arXiv:2402.06787): parts a second = min over
  sets S of devices of links(S, rest) / |S|. Maximum flows find this minimum: from a source with an
  edge of capacity x to every device, n x must reach each device; where it does not, the cut gives
  the next, smaller x.
- All-to-all along shortest paths: the fullest link is the one with the largest betweenness.
- A message takes the hops of the shortest path, in the mean over all pairs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.errors import ClusterError

MOST = 256
"""Children of a wired level at most: beyond, the flows take minutes."""
CLOSE = 1e-9
"""Relative difference of two flows that counts as rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The parts of a device's links that a group uses, and the mean hops of a message."""

    telling: float
    exchanging: float
    hops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The links of a level: a `torus` of some sides, or the `joined` pairs, one a link.

    The numbers of a torus's last side run fastest.
    """

    torus: tuple[int, ...] = ()
    joined: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.torus) == bool(self.joined):
            raise ClusterError(
                "a wiring is either a torus of some sides or a list of pairs that are joined"
            )
        if any(side < 1 for side in self.torus) or any(
            a == b or min(a, b) < 0 for a, b in self.joined
        ):
            raise ClusterError(
                "the sides of a torus are at least 1, and a link joins two different children, "
                "numbered from 0"
            )
        if not 2 <= self.children <= MOST:
            raise ClusterError(f"a wiring joins 2 to {MOST} children, not {self.children}")
        if not _joins_all(self):
            raise ClusterError(
                "the pairs that are joined leave some children alone: there is no way from 0 to "
                "all others"
            )

    @property
    def children(self) -> int:
        """The number of joined children."""
        return math.prod(self.torus) if self.torus else 1 + max(max(pair) for pair in self.joined)

    def links(self) -> Iterator[tuple[int, int]]:
        """Every link once."""
        if self.joined:
            yield from self.joined
            return
        for place in itertools.product(*map(range, self.torus)):
            for axis, side in enumerate(self.torus):
                # A ring of two devices has one link, not two.
                if side > 2 or (side == 2 and place[axis] == 0):
                    yield (
                        self._number(place),
                        self._number((*place[:axis], (place[axis] + 1) % side, *place[axis + 1 :])),
                    )

    def reach(self, group: int) -> Reach:
        """Return the rates of a group of the first `group` children.

        A group larger than the wiring has all of it.
        """
        return _reach(self, min(group, self.children))

    def as_file(self) -> dict[str, object]:
        """Return the mapping that a cluster file has."""
        return (
            {"torus": list(self.torus)}
            if self.torus
            else {"joined": [list(pair) for pair in self.joined]}
        )

    def _number(self, place: tuple[int, ...]) -> int:
        return functools.reduce(
            lambda number, pair: number * pair[0] + pair[1], zip(self.torus, place, strict=True), 0
        )


def _graph(wiring: Wiring, group: int) -> Any:
    """The first children and their links, as a graph whose edges have a capacity in links."""
    import networkx as nx  # takes a tenth of a second, which only clusters with a wiring pay

    graph = nx.Graph()
    graph.add_nodes_from(range(group))
    for a, b in wiring.links():
        if max(a, b) < group:
            more = graph.edges[a, b]["capacity"] if graph.has_edge(a, b) else 0
            graph.add_edge(a, b, capacity=more + 1)
    return graph


def _joins_all(wiring: Wiring) -> bool:
    import networkx as nx

    return bool(nx.is_connected(_graph(wiring, wiring.children)))


@functools.lru_cache(maxsize=256)
def _reach(wiring: Wiring, group: int) -> Reach:
    """The rates of a group."""
    import networkx as nx

    if group < 2:
        return Reach(telling=1.0, exchanging=1.0, hops=1.0)
    # Rates are shares of a device's bandwidth, which all its links (`ports`) have together.
    ports = max(dict(_graph(wiring, wiring.children).degree(weight="capacity")).values())
    graph = _graph(wiring, group)
    if not nx.is_connected(graph):
        # The group's messages pass through other children, which send as well.
        return _reach(wiring, wiring.children)
    loads = nx.edge_betweenness_centrality(graph, normalized=False)
    # Betweenness counts the pairs whose messages pass a link: in the time in which the fullest link
    # carries them, every device sends to every other one.
    fullest = max(load / graph.edges[edge]["capacity"] for edge, load in loads.items())
    # On a whole torus all devices look alike.
    even = bool(wiring.torus) and group == wiring.children
    return Reach(
        telling=_parts_a_second(graph, even=even) * (group - 1) / ports,
        exchanging=min((group - 1) / fullest / ports, 1.0),
        hops=float(nx.average_shortest_path_length(graph)),
    )


def _parts_a_second(graph: Any, *, even: bool) -> float:
    """Return the parts that all can send to all in the time in which a link carries one.

    `even`: one device stands for all.
    """
    import networkx as nx

    count = graph.number_of_nodes()
    degrees = dict(graph.degree(weight="capacity"))
    ends = sorted(degrees, key=lambda node: degrees[node])[: 1 if even else count]
    pipes = graph.to_directed()
    # The search starts at the cut around the device with the fewest links.
    parts = min(degrees.values()) / (count - 1)
    narrower: float | None = parts
    while narrower is not None:
        parts = narrower
        narrower = None
        pipes.add_weighted_edges_from((("all", node, parts) for node in graph), weight="capacity")
        for end in ends:
            value, (near, _) = nx.minimum_cut(pipes, "all", end)
            told = near - {"all"}
            if told and value < count * parts * (1 - CLOSE):
                narrower = sum(
                    graph.edges[edge]["capacity"] for edge in nx.edge_boundary(graph, told)
                ) / len(told)
                break
    return float(parts)
