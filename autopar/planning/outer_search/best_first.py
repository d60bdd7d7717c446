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
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import Request
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import LARGE, Candidate, device_counts, halves
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode
from autopar.search import Infeasible, NoAssignment
from autopar.sharding.mesh import Mesh

from .book import Book
from .candidate_solver import CandidateSolver
from .evaluator import Evaluator, Played
from .finer_meshes import finer_cases, worth_splitting
from .waits import Waits
from .whole_programs import Program, WholePrograms


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A case that does not fit the memory, and the least bytes that it needs on a device."""

    candidate: Candidate
    mode: Mode
    needed: float


Place = tuple[Sequence[Candidate], Sequence[Candidate]]
"""The candidates of a mesh: those worth trying, and all, in case pins forbid the former."""
Node = Place | Candidate | Case | Solved


class BestFirst:
    """The search of one request.

    `programs`: the incumbents, the fastest first, `incumbents`: their solutions. `fastest`: the
    fastest solution of each candidate, as it was played. `failures`: of whole programs. `misfits`:
    cases that do not fit the memory. `forbidden`: the number of places that pins forbid.
    `complete`: whether the search ran to its end. `idle`: candidates played since the last program
    that was faster than the incumbent.
    """

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded = folded
        self.request = request
        self.solver = CandidateSolver(folded, request)
        self.evaluator = Evaluator(self.solver)
        self.book = Book(self.solver)
        self.queue: list[tuple[float, int, float, Node]] = []
        self._waits = Waits(folded)
        self.whole = WholePrograms(self.evaluator)
        self.programs: list[Program] = []
        self.incumbents: list[Played] = []
        self.fastest: dict[Candidate, Played] = {}
        self.misfits: list[Misfit] = []
        self.failures: list[Infeasible] = []
        self.forbidden = 0
        self.complete = True
        self.idle = 0
        self.tried: set[tuple[Candidate, Mode]] = set()
        self.promises: dict[Candidate, float] = {}
        self.places: dict[tuple[int, int, Mesh], list[Candidate]] = {}
        self.solved: set[Candidate] = set()
        self.played: set[Candidate] = set()
        # Decides between equal promises, as nodes themselves cannot be compared.
        self._number = itertools.count()
        self._places = 0
        self._progress: Progress | None = None

    @property
    def best(self) -> float:
        """Seconds of the incumbent's step."""
        return self.incumbents[0].seconds if self.incumbents else math.inf

    @property
    def bound(self) -> float:
        """Seconds that no plan of the candidates undercuts."""
        return min(self.book.least, self.best)

    @property
    def enough(self) -> float:
        """A promise that is not below this is not looked at."""
        return (1 - EFFORT.close) * self.best

    def run(self, progress: Progress | None = None) -> None:
        """Search until the incumbent is below the next promise, and certify it.

        Interrupted, the search leaves its incumbent, if any, with a bound for all that is left.
        """
        self._progress = progress
        try:
            self.find()
            if self.incumbents:
                self.book.close_in(self.best)
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

    # --- The queue. ---

    def _push(self, promise: float, node: Node) -> None:
        """Add a node; of equal ones those that entered first are looked at first."""
        if promise < math.inf:
            key = promise if self.incumbents else self._estimate(promise, node)
            heapq.heappush(self.queue, (key, next(self._number), promise, node))

    def _estimate(self, promise: float, node: Node) -> float:
        """Seconds that the best program of a node is likely to take."""
        if isinstance(node, Solved):
            return max(node.seconds, promise) * self._waits.factor(node.candidate)
        if isinstance(node, Case):
            return promise * self._waits.factor(node.candidate)
        group = [node] if isinstance(node, Candidate) else node[0] or node[1]
        return min(max(promise, self.book.sure[one]) * self._waits.factor(one) for one in group)

    def _search(self) -> None:
        """Replace nodes until none promises less than the incumbent takes.

        Until there is an incumbent, the node of the least estimate comes first, as a fast incumbent
        ends the trials of slow programs early. Then it is the node of the least promise.
        """
        while self.queue and not self.incumbents:
            _, _, promise, node = heapq.heappop(self.queue)
            self._replace(promise, node)
        self.queue = [(promise, number, promise, node) for _, number, promise, node in self.queue]
        heapq.heapify(self.queue)
        self.idle = 0
        while self.queue and self.queue[0][0] < self.enough:
            # Giving up here keeps the bound true, as it counts the nodes that are left.
            if self.idle >= EFFORT.patience:
                break
            _, _, promise, node = heapq.heappop(self.queue)
            self._replace(promise, node)

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
        self._push(min(self.book.sure[candidate] for candidate in group), place)

    def _expand_place(self, place: Place) -> None:
        # All candidates of a mesh are looked at only where pins forbid the usual ones.
        for group in place:
            if group and (allowed := self.book.bound_mesh(group)):
                self._report(str(allowed[0]))
                self.places[allowed[0].place] = allowed
                for candidate in allowed:
                    self._push(self.book.sure[candidate], candidate)
                return
        self.forbidden += 1

    def _expand_candidate(self, promise: float, candidate: Candidate) -> None:
        """Push a candidate back as long as its promise rises, then solve its first mode.

        A solution of fewer micro-batches raises the promises of all with more. So of those that are
        still unsolved on the mesh the middle one is solved first, as in a bisection.
        """
        if candidate in self.solved:
            return
        risen = self._promise_of(candidate)
        # Its promise rose while it waited in the queue, so others may come first now.
        if risen > promise:
            self._push(risen, candidate)
            return
        middle = self._middle(candidate)
        first = next(iter(self.solver.modes()))
        self.tried.add((middle, first))
        # At once, as its solution raises the promises of others that wait with the same one.
        self._expand_case(promise, self.solver.case(middle, first))
        if middle != candidate:
            self._push(promise, candidate)

    def _promise_of(self, candidate: Candidate) -> float:
        return max(self.book.sure[candidate], self.promises.get(candidate, 0.0))

    def _middle(self, candidate: Candidate) -> Candidate:
        """The middle of the unsolved candidates on a mesh with as many micro-batches or fewer."""
        unsolved = [
            other
            for other in self.places[candidate.place]
            if other.micro_batches <= candidate.micro_batches
            and other not in self.solved
            and self._promise_of(other) < self.enough
        ]
        # Without stages the largest micro-batches are the fastest, if they fit.
        middle = unsolved[(len(unsolved) - 1) // 2] if candidate.stages > 1 else unsolved[0]
        self.solved.add(middle)
        return middle

    def _tighten(self, case: Case) -> None:
        """Raise the promises of more micro-batches on the same mesh: smaller ones are no faster."""
        candidate = case.candidate
        free = self.evaluator.free_bounds.get(case)
        if free is None:
            return
        for other in self.places[candidate.place]:
            if other.micro_batches >= candidate.micro_batches:
                bound = self.solver.bounds.bound(other, candidate.micro_batches, free)
                self.promises[other] = max(self.promises.get(other, 0.0), bound)

    # --- Modes. ---

    def _push_mode(self, promise: float, candidate: Candidate, mode: Mode) -> None:
        # A mode may be reached from several others, but is solved once.
        if (candidate, mode) not in self.tried:
            self.tried.add((candidate, mode))
            self._push(promise, self.solver.case(candidate, mode))

    def _expand_case(self, promise: float, case: Case) -> None:
        """Solve a case, and add the modes that may be faster than it."""
        candidate = case.candidate
        solved: Solved | None = None
        try:
            solved = self.evaluator.promise(case, below=self.enough)
        except Infeasible as error:
            # The tables add up the bytes of all stages; a misfit tells those of one device.
            self._misfit(case, error.minimum_memory / candidate.stages)
        except NoAssignment:
            self.forbidden += 1
            return
        self._tighten(case)
        if solved is not None:
            self._push(max(promise, solved.promise), solved)
        # No mode that does more work is faster than the optimum without a limit of memory.
        if case in self.evaluator.free_bounds:
            free = self.evaluator.free_bounds[case]
            promise = max(promise, self.solver.promise_of(candidate, free))
        roomy = False
        if solved is not None and solved.free:
            roomy = solved.solution.memory <= EFFORT.plenty * self.solver.room(candidate)
            if roomy and candidate.stages == 1:
                self._settle_smaller(candidate)
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
            least = self.promises.get(candidate, 0.0) + self.solver.recomputed(candidate, other)
            self._push_mode(max(promise, least), candidate, other)

    def _settle_smaller(self, candidate: Candidate) -> None:
        """Leave out smaller micro-batches without stages: they only save memory, which is ample."""
        for other in self.places.get(candidate.place, ()):
            if other.micro_batches > candidate.micro_batches:
                self.promises[other] = math.inf

    def _misfit(self, case: Case, needed: float) -> None:
        self.misfits.append(Misfit(candidate=case.candidate, mode=case.mode, needed=needed))

    # --- Programs. ---

    def _play(self, solved: Solved) -> None:
        """Play a solution; a program faster than the incumbent's takes its place.

        On the whole graph a pipeline may take longer than its folded cuts: what is compared is the
        program that would be the plan.
        """
        # A candidate's modes are mostly alike, so all of them are one try.
        if solved.candidate not in self.played:
            self.idle += 1
        self.played.add(solved.candidate)
        try:
            for played in self.evaluator.play(solved, self.best):
                self._note(played)
                if played.seconds < self.best:
                    self._challenge(played)
        except Infeasible as error:
            self._misfit(solved.case, error.minimum_memory / solved.candidate.stages)
            # Unlike layers may fit where equal ones need a little too much. They are tried only as
            # long as nothing else fits.
            likely = EFFORT.likely * self.solver.room(solved.candidate)
            if not self.incumbents and error.minimum_memory <= likely:
                self._challenge(Played(solved=solved, seconds=math.inf, limited=True))

    def _note(self, played: Played) -> None:
        """Remember the fastest program of each candidate, for its mesh to be split."""
        fastest = self.fastest.setdefault(played.solved.candidate, played)
        if played.seconds < fastest.seconds:
            self.fastest[played.solved.candidate] = played

    def _challenge(self, played: Played) -> None:
        """Compare the whole program of a solution with the incumbent."""
        try:
            program = self.whole.program(played)
        except Infeasible as error:
            self.failures.append(error)
            return
        if program.seconds >= self.best:
            return
        # A gain below `close` is taken, but is no reason to go on looking.
        if program.seconds < self.enough:
            self.idle = 0
        self.programs.insert(0, program)
        self.incumbents.insert(0, replace(played, seconds=program.seconds))

    def _refine(self) -> None:
        """Split an axis of the fastest candidates' meshes in two."""
        if self.request.mesh is not None or not self.incumbents:
            return
        for fast in worth_splitting(self.fastest.values()):
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
                solved = self.evaluator.promise(case, below=self.enough)
                if solved is not None and solved.promise < self.enough:
                    self._play(solved)
            fastest = self.fastest.get(case.candidate)
            if fastest is None or fastest.seconds > EFFORT.near * self.best:
                return

    def _report(self, text: str) -> None:
        if self._progress:
            left = sum(isinstance(entry[-1], tuple) for entry in self.queue)
            self._progress(self._places - left, self._places, text)
