"""The step that a node of the queue is likely to take, for the order in which first programs are
tried.

A pipeline of p stages of v chunks waits (p - 1) / v passes for its m micro-batches, so that a step
takes 1 + (p - 1) / (v m) times as long as without waiting (Narayanan et al., 2021). Here a chunk
has at least one layer. Bounds cannot assume that, as plans may cut inside layers.
"""

from __future__ import annotations

from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import Candidate

from .book import Book
from .node_queue import Node


class Estimates:
    """The estimates of a search."""

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
