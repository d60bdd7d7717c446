"""Questions about nodes of the outer search that other processes work on ahead of it.

Each says in a few values what the search will compute; its `work` computes the same in a process
that was forked from the search, for the sake of the figures that are noted on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planning.model.request import Request
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.search import Solution
from autopar.sharding.mesh import Mesh

from .book import Book
from .evaluator import Evaluator

Books = Sequence[Book]
"""The books of a search: that which orders it comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A candidate without its cluster, which is that of the request."""

    devices: int
    stages: int
    mesh: Mesh
    micro_batches: int

    @classmethod
    def of(cls, candidate: Candidate) -> Spot:
        """The spot of a candidate."""
        devices, stages, mesh, micro_batches = candidate.key
        return cls(devices=devices, stages=stages, mesh=mesh, micro_batches=micro_batches)

    def candidate(self, request: Request) -> Candidate:
        """The candidate of a request."""
        return Candidate(
            cluster=request.cluster.sized(self.devices),
            stages=self.stages,
            mesh=self.mesh,
            micro_batches=self.micro_batches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    spot: Spot

    @property
    def place(self) -> tuple[int, int, Mesh]:
        """Devices, stages and mesh."""
        return self.spot.devices, self.spot.stages, self.spot.mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class OfMesh(_About):
    """The bound of a mesh, with the fewest micro-batches of its candidates."""

    @classmethod
    def of(cls, candidate: Candidate) -> OfMesh:
        """The question about a candidate's mesh."""
        return cls(spot=Spot.of(candidate))

    def work(self, evaluator: Evaluator, books: Books) -> None:
        """Bound the mesh."""
        books[0].bound_mesh([self.spot.candidate(evaluator.request)])


@dataclass(frozen=True, slots=True, kw_only=True)
class OfBound(_About):
    """The bound of a candidate by a solution of its own, as far as `enough`.

    `number`: of the book of bounds.
    """

    enough: float
    number: int

    @classmethod
    def of(cls, candidate: Candidate, enough: float, number: int) -> OfBound:
        """The question about a candidate."""
        return cls(spot=Spot.of(candidate), enough=enough, number=number)

    def work(self, evaluator: Evaluator, books: Books) -> None:
        """Raise the bound, unless pins turned out to forbid the candidate."""
        candidate = self.spot.candidate(evaluator.request)
        book = books[self.number]
        if candidate in book.sure:
            book.proof.raise_by(candidate, self.enough)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfCase(_About):
    mode: Mode
    hidden: float
    binding: bool

    def case(self, evaluator: Evaluator) -> Case:
        """The case, with what the search knows of its memory."""
        candidate = self.spot.candidate(evaluator.request)
        # The search may have learnt it, or the other process earlier than the search.
        bound = evaluator.solver.binding
        (bound.add if self.binding else bound.discard)((candidate, self.mode))
        return Case(candidate=candidate, mode=self.mode, hidden=self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfPromise(_OfCase):
    """The promise of a case, if that is below `below` seconds.

    `best`: seconds of the incumbent, where its program is to be played at once (None: it is not).
    """

    below: float
    best: float | None

    @classmethod
    def of(
        cls, evaluator: Evaluator, case: Case, below: float, best: float | None = None
    ) -> OfPromise:
        """The question about a case."""
        return cls(
            spot=Spot.of(case.candidate),
            mode=case.mode,
            hidden=case.hidden,
            binding=evaluator.solver.is_bound(case),
            below=below,
            best=best,
        )

    def work(self, evaluator: Evaluator, books: Books) -> None:
        """Solve the case, and play its program."""
        solved = evaluator.promise(self.case(evaluator), self.below)
        # A program follows at once only where the search would play it at once.
        if solved is not None and self.best is not None and solved.promise < self.below:
            evaluator.play(solved, self.best)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfPrograms(_OfCase):
    """The programs of a solution, as far as the incumbent's `best` seconds allow.

    The other fields are those of `Solved`.
    """

    solution: Solution
    seconds: float
    promise: float
    free: bool
    beyond: float
    best: float

    @classmethod
    def of(cls, evaluator: Evaluator, solved: Solved, best: float) -> OfPrograms:
        """The question about a solution."""
        return cls(
            spot=Spot.of(solved.candidate),
            mode=solved.mode,
            hidden=solved.hidden,
            binding=evaluator.solver.is_bound(solved.case),
            solution=solved.solution,
            seconds=solved.seconds,
            promise=solved.promise,
            free=solved.free,
            beyond=solved.beyond,
            best=best,
        )

    def work(self, evaluator: Evaluator, books: Books) -> None:
        """Play the programs."""
        case = self.case(evaluator)
        solved = Solved(
            case=case,
            made=evaluator.tables(case),
            solution=self.solution,
            seconds=self.seconds,
            promise=self.promise,
            free=self.free,
            beyond=self.beyond,
        )
        evaluator.play(solved, self.best)


Question = OfMesh | OfBound | OfPromise | OfPrograms
