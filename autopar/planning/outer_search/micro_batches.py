"""The micro-batches of a mesh: which number is solved next, and what it tells of the others.

Smaller micro-batches are never faster, so that a solution bounds all larger numbers of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.planning.space.candidates import Candidate
from autopar.sharding.mesh import Mesh

from .candidate_solver import CandidateSolver


class MicroBatches:
    """The candidates of every mesh, with what is promised of them beyond their bounds.

    `solved`: the candidates of which a mode was solved.
    """

    def __init__(self, solver: CandidateSolver) -> None:
        self.solver = solver
        self.solved: set[Candidate] = set()
        self._promises: defaultdict[Candidate, float] = defaultdict(float)
        self._on_mesh: dict[tuple[int, int, Mesh], Sequence[Candidate]] = {}

    def enter(self, candidates: Sequence[Candidate]) -> None:
        """Add the candidates of a mesh, by rising numbers of micro-batches."""
        self._on_mesh[candidates[0].place] = candidates

    def promise(self, candidate: Candidate) -> float:
        """Seconds that solutions of fewer micro-batches promise; 0 where there are none."""
        return self._promises[candidate]

    def following(self, candidate: Candidate, open_ones: Sequence[Candidate]) -> Candidate:
        """Return the candidate of a mesh to solve next, of those with as many or fewer.

        `open_ones`: those of the mesh that may still be faster than the incumbent. With stages the
        middle one is solved first, as in a bisection, because it rules out the most others.
        """
        unsolved = [
            other
            for other in open_ones
            if other.micro_batches <= candidate.micro_batches and other not in self.solved
        ]
        # Without stages the largest micro-batches are the fastest, if they fit.
        return unsolved[(len(unsolved) - 1) // 2] if candidate.stages > 1 else unsolved[0]

    def on_mesh_of(self, candidate: Candidate) -> Sequence[Candidate]:
        """The candidates of the same mesh."""
        return self._on_mesh.get(candidate.place, ())

    def tighten(self, candidate: Candidate, free: float) -> None:
        """Raise the promises of as many micro-batches or more.

        `free`: a bound on the sum of the candidate's tables without a limit of memory.
        """
        for other in self.on_mesh_of(candidate):
            if other.micro_batches >= candidate.micro_batches:
                bound = self.solver.bounds.bound(other, candidate.micro_batches, free)
                promise = self.solver.hardly_undercut(other, bound)
                self._promises[other] = max(self._promises[other], promise)
