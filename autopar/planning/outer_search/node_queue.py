"""The queue of the outer search: its nodes, the one of the least promise or estimate first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import Candidate

from .book import Book

Place = tuple[Sequence[Candidate], Sequence[Candidate]]
"""The candidates of a mesh: those worth trying, and all, in case pins forbid the former."""
Node = Place | Candidate | Case | Solved
Order = Callable[[float, Node], float]
"""The key of a node, given its promise: the node of the least key comes first."""


def by_promise(promise: float, node: Node) -> float:
    """The promise itself."""
    return promise


class Estimates:
    """Estimates of the step that a node is likely to take, by which first programs are tried.

    A pipeline of p stages of v chunks waits (p - 1) / v passes for its m micro-batches, so that a
    step takes 1 + (p - 1) / (v m) times as long as without waiting (Narayanan et al., 2021). Here a
    chunk has at least one layer. Bounds cannot assume that, as plans may cut inside layers.
    """

    def __init__(self, folded: FoldedModel, book: Book) -> None:
        self.book = book
        self._layers = max((run.layers for run in folded.runs), default=1)

    def of(self, promise: float, node: Node) -> float:
        """Seconds that the best program of a node is likely to take."""
        if isinstance(node, Solved):
            return max(node.seconds, promise) * self._waiting(node.candidate)
        if isinstance(node, Case):
            return promise * self._waiting(node.candidate)
        group = [node] if isinstance(node, Candidate) else node[0] or node[1]
        return min(max(promise, self.book.sure[one]) * self._waiting(one) for one in group)

    def _waiting(self, candidate: Candidate) -> float:
        """The factor by which waiting is likely to lengthen a candidate's step."""
        chunks = max(self._layers // candidate.stages, 1)
        return 1 + (candidate.stages - 1) / (chunks * candidate.micro_batches)


class NodeQueue:
    """Nodes with their promises. Of nodes with equal keys, those that entered first come first."""

    def __init__(self, order: Order) -> None:
        self._order = order
        # The number decides between equal keys, as nodes themselves cannot be compared.
        self._entries: list[tuple[float, int, float, Node]] = []
        self._number = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def least(self) -> float:
        """The key of the node that comes first."""
        return self._entries[0][0]

    @property
    def places(self) -> int:
        """Number of places among the nodes."""
        return sum(isinstance(entry[-1], tuple) for entry in self._entries)

    def first(self, count: int) -> Iterator[tuple[float, Node]]:
        """The nodes that would come first, with their promises."""
        for _, _, promise, node in heapq.nsmallest(count, self._entries):
            yield promise, node

    def push(self, promise: float, node: Node) -> None:
        """Add a node, unless its promise is endless, as that of one left out."""
        if promise < math.inf:
            entry = (self._order(promise, node), next(self._number), promise, node)
            heapq.heappush(self._entries, entry)

    def pop(self) -> tuple[float, Node]:
        """Take the node that comes first, with its promise."""
        _, _, promise, node = heapq.heappop(self._entries)
        return promise, node

    def reorder(self, order: Order) -> None:
        """Change the order of the nodes that are left, and of those to come."""
        self._order = order
        self._entries = [
            (order(promise, node), number, promise, node)
            for _, number, promise, node in self._entries
        ]
        heapq.heapify(self._entries)
