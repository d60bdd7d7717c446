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

import math
from collections.abc import Iterator

from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import Request
from autopar.planning.model.stops import Aim, Clock
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import LARGE, Candidate, device_counts, halves
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode
from autopar.search import Infeasible, NoAssignment

from .book import Book
from .candidate_solver import CandidateSolver
from .evaluator import Bounded, Evaluator
from .incumbents import Incumbents
from .micro_batches import MicroBatches
from .misfits import Misfit
from .modes_in_turn import ModesInTurn
from .neighbours import Neighbours
from .node_queue import Estimates, Node, NodeQueue, Place, by_promise
from .whole_programs import WholePrograms


class BestFirst:
    """The search of one request.

    `clock`: of all searches of the request. `misfits`: cases that do not fit the memory.
    `forbidden`: the number of places that pins forbid. `complete`: whether the search ran to its
    end.
    """

    def __init__(self, folded: FoldedModel, request: Request, clock: Clock | None = None) -> None:
        self.folded = folded
        self.request = request
        self.aim = Aim(gap=request.gap)
        self.clock = clock or Clock(request.seconds)
        self.solver = CandidateSolver(folded, request)
        self.evaluator = Evaluator(self.solver)
        self.book = Book(self.solver, self.aim, self.clock)
        self.hiding = Book(CandidateSolver(folded, request, hiding=True), self.aim, self.clock)
        self.whole = WholePrograms(self.evaluator)
        self.incumbents = Incumbents(self.whole)
        self.queue = NodeQueue(Estimates(folded, self.book).of)
        self.micro_batches = MicroBatches(self.solver)
        self.modes = ModesInTurn()
        self.neighbours = Neighbours(
            evaluator=self.evaluator,
            incumbents=self.incumbents,
            modes=self.modes,
            clock=self.clock,
            play=self._play,
        )
        self.misfits: list[Misfit] = []
        self.forbidden = 0
        self.complete = True
        self._certified = math.inf
        self._places = 0
        self._progress: Progress | None = None

    @property
    def bound(self) -> float:
        """Seconds that no plan of the candidates undercuts."""
        return min(self._least, self.incumbents.best)

    @property
    def _least(self) -> float:
        return min(self.book.least, self.hiding.least)

    @property
    def held_by(self) -> str:
        """The candidate that holds the bound ("" if the incumbent does)."""
        if self._least >= self.incumbents.best:
            return ""
        return str(min((self.book, self.hiding), key=lambda book: book.least).held_by)

    def run(self, progress: Progress | None = None) -> None:
        """Search until the incumbent is below the next promise, and certify it.

        Interrupted, the search leaves its incumbent, if any, with a bound for all that is left.
        """
        self._progress = progress
        try:
            self.find()
            if self.incumbents and self.request.certified:
                self._close_in()
        # Whoever interrupts the search is owed the best so far; without any, the interrupt goes on.
        except KeyboardInterrupt:
            self.complete = False
            if not self.incumbents and (best := self._best_solution()) is not None:
                self._play(best)
                self.incumbents.settle()
            if not self.incumbents:
                raise
        if progress:
            progress(1, 1, "done")

    def find(self) -> None:
        """Search until the incumbent is below the next promise."""
        for place in self._all_places():
            self._enter(place)
        self._search()
        if not self.incumbents:
            self._solve_bounded()
            self._search()
        if not self._is_near_enough():
            self.neighbours.try_finer_meshes()

    def _close_in(self) -> None:
        """Raise the bounds of all plans, those that hide exchanges first, as they are lower."""
        self.hiding.close_in(self.incumbents.best)
        # Bounds above the least of all prove nothing more.
        self.book.close_in(self.incumbents.best, self.hiding.least)

    def _search(self) -> None:
        """Replace nodes until none promises less than the incumbent takes.

        Until there is an incumbent, the node of the least estimate comes first, as a fast incumbent
        ends the trials of slow programs early. Then it is the node of the least promise.
        """
        while self.queue and not self.incumbents:
            self._replace(*self.queue.pop())
        self.queue.reorder(by_promise)
        while self.queue and self.queue.least < self.incumbents.enough:
            # Ending here keeps the bound true, as it counts the nodes that are left.
            if self._is_near_enough():
                break
            self.clock.look()
            self._replace(*self.queue.pop())

    def _is_near_enough(self) -> bool:
        """Whether the incumbent is within the gap that is asked for.

        Bounds are raised for it once for every incumbent.
        """
        best = self.incumbents.best
        if not self.aim.is_patient or not self.incumbents:
            return False
        # Raising bounds costs as much as several programs, and they only rise.
        if best < self._certified:
            self._close_in()
            self._certified = best
        return self._least >= self.aim.enough(best)

    def _replace(self, promise: float, node: Node) -> None:
        if isinstance(node, Candidate):
            self._expand_candidate(promise, node)
        elif isinstance(node, Case):
            self._expand_case(promise, node)
        elif isinstance(node, Solved):
            self._play(node)
        else:
            self._expand_place(node)
        self.incumbents.settle()

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
        self.hiding.enter(group)
        self._places += 1
        # A place promises as much as its best candidate, so that none of them comes too late.
        self.queue.push(min(self.book.sure[candidate] for candidate in group), place)

    def _expand_place(self, place: Place) -> None:
        # All candidates of a mesh are looked at only where pins forbid the usual ones.
        for group in place:
            if group and (allowed := self.book.bound_mesh(group)):
                if group is not place[0]:
                    self.hiding.enter(allowed)
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
        following = self._following(candidate)
        self.micro_batches.solved.add(following)
        first = next(iter(self.solver.modes()))
        self.modes.reach(following, first)
        # At once, as its solution raises the promises of others that wait with the same one.
        self._expand_case(promise, self.solver.case(following, first))
        if following != candidate:
            self.queue.push(promise, candidate)

    def _promise_of(self, candidate: Candidate) -> float:
        return max(self.book.sure[candidate], self.micro_batches.promise(candidate))

    # --- Modes. ---

    def _push_mode(self, promise: float, candidate: Candidate, mode: Mode) -> None:
        # A mode may be reached from several others, but is solved once.
        if self.modes.reach(candidate, mode):
            self.queue.push(promise, self.solver.case(candidate, mode))

    def _expand_case(self, promise: float, case: Case) -> None:
        """Solve a case, and add the modes that may be faster than it."""
        if self.modes.waits(promise, case):
            return
        candidate = case.candidate
        solved: Solved | None = None
        below = self.incumbents.enough
        try:
            solved = self.evaluator.promise(case, below)
        except Infeasible as error:
            self._misfit(case, error)
        except NoAssignment:
            self.forbidden += 1
            return
        if solved is not None:
            self.queue.push(max(promise, solved.promise), solved)
        if (free := self.evaluator.free.bounds.get(case)) is not None:
            self.micro_batches.tighten(candidate, free)
            # No mode that does more work is faster than the optimum without a limit of memory.
            promise = max(promise, self.solver.promise_of(candidate, free))
        self._push_others(promise, case)
        if solved is None or not solved.free:
            return
        self.modes.fits_freely(case)
        whole = self.solver.stored_whole(case.mode)
        if whole is not None and candidate.mesh.devices > 1:
            self._push_mode(promise, candidate, whole)

    def _push_others(self, promise: float, case: Case) -> None:
        """Add the modes that do all the work of a case: only memory makes them faster."""
        candidate = case.candidate
        for other in self.solver.modes():
            # On one device all parameters are whole, however they are stored.
            alone = candidate.mesh.devices == 1 and other.zero != case.mode.zero
            if alone or not other.repeats(case.mode):
                continue
            # Of all modes the first does least work, whatever the memory is.
            first = self.micro_batches.promise(candidate)
            least = first + self.solver.recomputed(candidate, other)
            self._push_mode(max(promise, least), candidate, other)

    def _misfit(self, case: Case, error: Infeasible) -> None:
        # The tables add up the bytes of all stages; a misfit tells those of one device.
        needed = error.minimum_memory / case.candidate.stages
        bounded = isinstance(error, Bounded)
        self.misfits.append(
            Misfit(candidate=case.candidate, mode=case.mode, needed=needed, bounded=bounded)
        )

    def _solve_bounded(self) -> None:
        """Solve the cases of whose bytes only a bound is known, as theirs may be the answer."""
        misfits = self.misfits
        self.misfits = []
        for misfit in misfits:
            if not misfit.bounded:
                self.misfits.append(misfit)
                continue
            case = self.solver.case(misfit.candidate, misfit.mode)
            try:
                solved = self.evaluator.solve(case)
            except Infeasible as error:
                self._misfit(case, error)
            except NoAssignment:
                self.forbidden += 1
            else:
                if solved is not None:
                    self.queue.push(solved.promise, solved)

    # --- Programs. ---

    def _play(self, solved: Solved) -> None:
        """Play a solution; a program faster than the incumbent's takes its place."""
        best = self.incumbents.best
        try:
            programs = self.evaluator.play(solved, best)
            for played in programs:
                self.incumbents.note(played)
            # Of programs near the best one, those of other modes may be a little faster yet.
            if programs:
                self._go_on(solved.case)
        except Infeasible as error:
            self._misfit(solved.case, error)
            self._go_on(solved.case)

    def _go_on(self, case: Case) -> None:
        """Put the modes back into the queue that waited for a case."""
        for promise, waiting in self.modes.go_on(case):
            self.queue.push(promise, waiting)

    def _following(self, candidate: Candidate) -> Candidate:
        """The candidate on a mesh to solve next, of those that may be faster than the incumbent."""
        on_mesh = self.micro_batches.on_mesh_of(candidate)
        open_ones = [one for one in on_mesh if self._promise_of(one) < self.incumbents.enough]
        return self.micro_batches.following(candidate, open_ones)

    def _best_solution(self) -> Solved | None:
        """The solution of the interrupted solve, or else the first one that waits to be played."""
        waiting = (node for _, node in self.queue.first(len(self.queue)))
        first = next((node for node in waiting if isinstance(node, Solved)), None)
        return self.evaluator.interrupted or first

    def _report(self, text: str) -> None:
        if self._progress:
            self._progress(self._places - self.queue.places, self._places, text)
