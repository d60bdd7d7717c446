"""The nodes that will come soon, as questions to other processes (`ahead.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import Candidate

from .ahead import Ahead
from .evaluator import Evaluator
from .node_queue import Node, NodeQueue
from .questions import Books, OfBound, OfMesh, OfPrograms, OfPromise, Question

UPCOMING = 6
"""Nodes of the queue, for each process, that others are asked about."""


class Foresight:
    """Asks others ahead of a search, and waits for their answers where the search is there.

    `books`: the one that orders the search comes first. `jobs`: processes that the search may take
    (None: as many as cores).
    """

    def __init__(self, evaluator: Evaluator, books: Books, jobs: int | None) -> None:
        self.evaluator = evaluator
        self.books = books
        homes = tuple(book.solver.bounds.figures for book in books)
        self.ahead = Ahead(self._work_on, homes, jobs)
        for number, book in enumerate(books):
            book.proof.before = functools.partial(self._before_raise, number)

    def _work_on(self, question: Question) -> None:
        """Work on a question, in a process that was forked from the search."""
        question.work(self.evaluator, self.books)

    def end(self) -> None:
        """End the other processes."""
        self.ahead.end()

    # --- The queue. ---

    def look(
        self,
        queue: NodeQueue,
        upcoming: Callable[[Candidate], Case | None],
        best: float,
        enough: float,
    ) -> None:
        """Ask about the first nodes, of those whose processes have time.

        `upcoming`: gives the case that is solved next for a candidate. `best`: seconds of the
        incumbent. `enough`: of a promise that is not looked at.
        """
        if not self.ahead.is_ready():
            return
        for _, node in queue.first(UPCOMING * self.ahead.count):
            # To say what comes next for a candidate takes time; a busy process needs no question.
            if self.ahead.has_time_for(_candidate_of(node).place):
                case = upcoming(node) if isinstance(node, Candidate) else node
                if case is not None and (question := self._about(case, best, enough)) is not None:
                    self.ahead.ask(question)

    def _about(self, node: Node, best: float, enough: float) -> Question | None:
        if isinstance(node, Case):
            return OfPromise.of(self.evaluator, node, enough)
        if isinstance(node, Solved):
            # Programs on fronts are short to play, and many.
            on_fronts = self.evaluator.memory_bound.on_fronts
            return None if on_fronts else OfPrograms.of(self.evaluator, node, best)
        return OfMesh.of(_candidate_of(node))

    def of_mesh(self, first: Candidate) -> None:
        """Wait for what others find of a candidate's mesh."""
        self.ahead.wait(OfMesh.of(first))

    def of_promise(self, case: Case, enough: float) -> None:
        """Wait for what others find of a case."""
        self.ahead.wait(OfPromise.of(self.evaluator, case, enough))

    def of_programs(self, solved: Solved, best: float) -> None:
        """Wait for what others find of the programs of a solution."""
        self.ahead.wait(OfPrograms.of(self.evaluator, solved, best))

    # --- Finer meshes, and bounds. ---

    def look_at_finer(self, cases: Iterable[Case], best: float, enough: float) -> None:
        """Ask about cases on finer meshes, which are played at once if they promise enough."""
        if self.ahead.is_ready():
            for case in cases:
                self.ahead.ask(self._finer(case, best, enough))

    def of_finer(self, case: Case, best: float, enough: float) -> None:
        """Wait for what others find of a case on a finer mesh."""
        self.ahead.wait(self._finer(case, best, enough))

    def _finer(self, case: Case, best: float, enough: float) -> OfPromise:
        on_fronts = self.evaluator.memory_bound.on_fronts
        return OfPromise.of(self.evaluator, case, enough, None if on_fronts else best)

    def _before_raise(
        self,
        number: int,
        candidate: Candidate,
        upcoming: Callable[[], Iterator[Candidate]],
        enough: float,
    ) -> None:
        # The next ones are asked about first: while they are raised, this one is waited for.
        if self.ahead.is_ready():
            for other in upcoming():
                self.ahead.ask(OfBound.of(other, enough, number))
        self.ahead.wait(OfBound.of(candidate, enough, number))


def _candidate_of(node: Node) -> Candidate:
    """The candidate of a node; of a place the first one."""
    if isinstance(node, tuple):
        return (node[0] or node[1])[0]
    return node if isinstance(node, Candidate) else node.candidate
