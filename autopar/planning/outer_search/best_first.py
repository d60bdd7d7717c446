"""The outer search: branch and bound over devices, stages, meshes, micro-batches and modes.

With p equal stages and m micro-batches a step takes

    T = [ (m + b) X + G ] / p        X: of the whole model for one micro-batch, G: once a step;
                                     b: the bubble, in passes

A queue holds nodes by their promise, which only rises from a node to what it is replaced by:

    place       devices, stages, mesh       the arithmetic alone
    candidate   with its micro-batches      one solution for the mesh, then one of its own
    case        with its mode               the solution that another mode has, then its own
    program                                 played to the last collective

The node of the least promise is replaced by more precise ones, or played. Until there is a first
incumbent, that of the least estimate comes before it. The search ends when the incumbent, the
fastest program, is below the next promise. (Best first: E. Lawler and D. Wood, 1966.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.planning.model.effort import EFFORT
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import Request
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import LARGE, Candidate, device_counts, halves
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode
from autopar.search import Infeasible, NoAssignment

from .book import Book
from .candidate_solver import CandidateSolver
from .estimates import Estimates
from .evaluator import Evaluator, Played
from .finer_meshes import finer_cases, worth_splitting
from .incumbents import Incumbents
from .micro_batches import MicroBatches
from .node_queue import Node, NodeQueue, Place, by_promise
from .whole_programs import WholePrograms


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A case that does not fit the memory, and the least bytes that it needs on a device."""

    candidate: Candidate
    mode: Mode
    needed: float


class BestFirst:
    """The search of one request.

    `misfits`: cases that do not fit the memory. `forbidden`: the number of places that pins forbid.
    `complete`: whether the search ran to its end. `tried`: cases that entered the queue.
    """

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded = folded
        self.request = request
        self.solver = CandidateSolver(folded, request)
        self.evaluator = Evaluator(self.solver)
        self.book = Book(self.solver)
        self.whole = WholePrograms(self.evaluator)
        self.incumbents = Incumbents(self.whole)
        self.queue = NodeQueue(Estimates(folded, self.book).of)
        self.micro_batches = MicroBatches(self.solver)
        self.misfits: list[Misfit] = []
        self.forbidden = 0
        self.complete = True
        self.tried: set[tuple[Candidate, Mode]] = set()
        self._places = 0
        self._progress: Progress | None = None

    @property
    def bound(self) -> float:
        """Seconds that no plan of the candidates undercuts."""
        return min(self.book.least, self.incumbents.best)

    def run(self, progress: Progress | None = None) -> None:
        """Search until the incumbent is below the next promise, and certify it.

        Interrupted, the search leaves its incumbent, if any, with a bound for all that is left.
        """
        self._progress = progress
        try:
            self.find()
            if self.incumbents:
                self.book.close_in(self.incumbents.best)
        # Whoever interrupts the search is owed the best so far; without any, the interrupt goes on.
        except KeyboardInterrupt:
            self.complete = False
            if not self.incumbents and self.evaluator.interrupted is not None:
                self._play(self.evaluator.interrupted)
            if not self.incumbents:
                raise
        if progress:
            progress(1, 1, "done")

    def find(self) -> None:
        """Search until the incumbent is below the next promise."""
        for place in self._all_places():
            self._enter(place)
        self._search()
        self._refine()

    def _search(self) -> None:
        """Replace nodes until none promises less than the incumbent takes.

        Until there is an incumbent, the node of the least estimate comes first, as a fast incumbent
        ends the trials of slow programs early. Then it is the node of the least promise.
        """
        while self.queue and not self.incumbents:
            self._replace(*self.queue.pop())
        self.queue.reorder(by_promise)
        self.incumbents.idle = 0
        while self.queue and self.queue.least < self.incumbents.enough:
            # Giving up here keeps the bound true, as it counts the nodes that are left.
            if self.incumbents.idle >= EFFORT.patience:
                break
            self._replace(*self.queue.pop())

    def _replace(self, promise: float, node: Node) -> None:
        if isinstance(node, Candidate):
            self._expand_candidate(promise, node)
        elif isinstance(node, Case):
            self._expand_case(promise, node)
        elif isinstance(node, Solved):
            self._play(node)
        else:
            self._expand_place(node)

    # --- Places and candidates. ---

    def _all_places(self) -> Iterator[Place]:
        groups = CandidateGroups(self.folded, self.request)
        devices = self.request.cluster.devices
        counts: tuple[int, ...] = (devices,)
        if self.request.fewer and self.request.mesh is None:
            counts = device_counts(devices)
            # Small models are slowed by each device, so that far fewer may be faster.
            if devices <= LARGE:
                counts = tuple(dict.fromkeys((*counts, *halves(devices))))
        for count in counts:
            yield from groups.groups(count)

    def _enter(self, place: Place) -> None:
        group = place[0] or place[1]
        self.book.enter(group)
        self._places += 1
        # A place promises as much as its best candidate, so that none of them comes too late.
        self.queue.push(min(self.book.sure[candidate] for candidate in group), place)

    def _expand_place(self, place: Place) -> None:
        # All candidates of a mesh are looked at only where pins forbid the usual ones.
        for group in place:
            if group and (allowed := self.book.bound_mesh(group)):
                self._report(str(allowed[0]))
                self.micro_batches.enter(allowed)
                for candidate in allowed:
                    self.queue.push(self.book.sure[candidate], candidate)
                return
        self.forbidden += 1

    def _expand_candidate(self, promise: float, candidate: Candidate) -> None:
        """Push a candidate back as long as its promise rises, then solve its first mode.

        A solution of fewer micro-batches raises the promises of all with more, so that one of those
        may be solved before the candidate itself.
        """
        if candidate in self.micro_batches.solved:
            return
        risen = self._promise_of(candidate)
        # Its promise rose while it waited in the queue, so others may come first now.
        if risen > promise:
            self.queue.push(risen, candidate)
            return
        on_mesh = self.micro_batches.on_mesh_of(candidate)
        open_ones = [one for one in on_mesh if self._promise_of(one) < self.incumbents.enough]
        following = self.micro_batches.take_next(candidate, open_ones)
        first = next(iter(self.solver.modes()))
        self.tried.add((following, first))
        # At once, as its solution raises the promises of others that wait with the same one.
        self._expand_case(promise, self.solver.case(following, first))
        if following != candidate:
            self.queue.push(promise, candidate)

    def _promise_of(self, candidate: Candidate) -> float:
        return max(self.book.sure[candidate], self.micro_batches.promise(candidate))

    # --- Modes. ---

    def _push_mode(self, promise: float, candidate: Candidate, mode: Mode) -> None:
        # A mode may be reached from several others, but is solved once.
        if (candidate, mode) not in self.tried:
            self.tried.add((candidate, mode))
            self.queue.push(promise, self.solver.case(candidate, mode))

    def _expand_case(self, promise: float, case: Case) -> None:
        """Solve a case, and add the modes that may be faster than it."""
        candidate = case.candidate
        solved: Solved | None = None
        try:
            solved = self.evaluator.promise(case, below=self.incumbents.enough)
        except Infeasible as error:
            # The tables add up the bytes of all stages; a misfit tells those of one device.
            self._misfit(case, error.minimum_memory / candidate.stages)
        except NoAssignment:
            self.forbidden += 1
            return
        if solved is not None:
            self.queue.push(max(promise, solved.promise), solved)
        if (free := self.evaluator.free_bounds.get(case)) is not None:
            self.micro_batches.tighten(candidate, free)
            # No mode that does more work is faster than the optimum without a limit of memory.
            promise = max(promise, self.solver.promise_of(candidate, free))
        roomy = False
        if solved is not None and solved.free:
            roomy = solved.solution.memory <= EFFORT.plenty * self.solver.room(candidate)
            if roomy and candidate.stages == 1:
                self.micro_batches.leave_smaller(candidate)
            if (whole := self.solver.stored_whole(case.mode)) is not None:
                self._push_mode(promise, candidate, whole)
        self._push_others(promise, case.mode, candidate, thriftier=not roomy)

    def _push_others(
        self, promise: float, mode: Mode, candidate: Candidate, *, thriftier: bool
    ) -> None:
        """Add the modes that do all the work of one.

        `thriftier`: add those that recompute more, too.
        """
        for other in self.solver.modes():
            if not other.repeats(mode) or not (thriftier or other.recompute == mode.recompute):
                continue
            # Of all modes the first does least work, whatever the memory is.
            first = self.micro_batches.promise(candidate)
            least = first + self.solver.recomputed(candidate, other)
            self._push_mode(max(promise, least), candidate, other)

    def _misfit(self, case: Case, needed: float) -> None:
        self.misfits.append(Misfit(candidate=case.candidate, mode=case.mode, needed=needed))

    # --- Programs. ---

    def _play(self, solved: Solved) -> None:
        """Play a solution; a program faster than the incumbent's takes its place."""
        self.incumbents.look_at(solved.candidate)
        try:
            for played in self.evaluator.play(solved, self.incumbents.best):
                self.incumbents.note(played)
        except Infeasible as error:
            self._misfit(solved.case, error.minimum_memory / solved.candidate.stages)
            # Unlike layers may fit where equal ones need a little too much. They are tried only as
            # long as nothing else fits.
            likely = EFFORT.likely * self.solver.room(solved.candidate)
            if not self.incumbents and error.minimum_memory <= likely:
                self.incumbents.challenge(Played(solved=solved, seconds=math.inf, limited=True))

    def _refine(self) -> None:
        """Split an axis of the fastest candidates' meshes in two."""
        if self.request.mesh is not None or not self.incumbents:
            return
        for fast in worth_splitting(self.incumbents.fastest.values()):
            for cases in finer_cases(self.solver, fast):
                self._try(cases)

    def _try(self, cases: Iterable[Case]) -> None:
        """Play a candidate's cases as long as its fastest program is near the best."""
        for case in cases:
            # Two meshes may be split into the same one.
            if (case.candidate, case.mode) in self.tried:
                continue
            self.tried.add((case.candidate, case.mode))
            with contextlib.suppress(Infeasible, NoAssignment):
                solved = self.evaluator.promise(case, below=self.incumbents.enough)
                if solved is not None and solved.promise < self.incumbents.enough:
                    self._play(solved)
            fastest = self.incumbents.fastest.get(case.candidate)
            if fastest is None or fastest.seconds > EFFORT.near * self.incumbents.best:
                return

    def _report(self, text: str) -> None:
        if self._progress:
            self._progress(self._places - self.queue.places, self._places, text)
