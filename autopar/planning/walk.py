"""The outer search: best first over devices, stages, meshes and micro-batches, on the graph with its equal layers folded.

With p equal stages and m micro-batches a step takes

    T = [ (m + b) X + G ] / p        X: of the whole model for one micro-batch, G: once a step; b: the bubble, in passes

The tables of a candidate hold (m + b) X + G, the memory of p devices is their limit. A bound that needs one solution for each mesh orders
the candidates (C: the least m X + G with the fewest micro-batches, A: the arithmetic alone; smaller micro-batches are never faster):

    T >= [ C + (b / m) A ] / p        b: of the schedule that waits least

Candidates are solved while their bound is below the best that is known (branch and bound: E. Lawler and D. Wood, 1966).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.search import Infeasible, NoAssignment

from .candidate_groups import CandidateGroups
from .candidate_solver import CandidateSolver
from .candidates import LARGE, Candidate, device_counts, halves, meshes, splits
from .folded_model import FoldedModel
from .ranking import Misfit, Progress, Ranking, needless_last
from .request import Request
from .solved_candidate import Mode, Solved
from .standing import Standing
from .tuning import TUNING
from .variations import variations
from .within import surely


class Walk:
    """The walk over the candidates of a request; `standing`: what is known of them before they are solved."""

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded, self.request = folded, request
        self.solver = CandidateSolver(folded, request)
        self.places = CandidateGroups(folded, request, self.solver.bounds)
        self.ranking = Ranking()
        self.groups: list[list[Candidate]] = []
        self.standing = Standing(self.solver.bounds, self.ranking, self.solver.room, self.solver.modes)
        self.forbidden: set[Candidate] = set()
        self.fewest = False
        self.varied: set[tuple[Candidate, Mode]] = set()

    def run(self, progress: Progress | None = None) -> Ranking:
        """Solve every mesh for one number of micro-batches, the best for others, and the best of all on finer meshes.

        Interrupted, it leaves what it has found, if anything, with a bound for all that is left. Run again, it goes on with what waits.
        """
        found = self.ranking
        try:
            self._run(progress)
        except KeyboardInterrupt:
            if self.solver.left is not None:
                self._add(self.solver.left)
            if not found.solved:
                raise
            found.complete = False
        found.bound = self.standing.least
        return found

    def settle(self, evaluated: Mapping[Solved, float]) -> None:
        """Replace what solutions promised by the seconds of their programs (infinite: none fits the memory)."""
        kept, self.ranking.solved = self.ranking.solved, []
        for solved in kept:
            if (seconds := evaluated.get(solved, solved.seconds)) < math.inf:
                self._add(replace(solved, seconds=seconds))
        # What was too slow may be worth a closer look beside what is left.
        for solved in [s for s in self.ranking.solved if s.uncut and s.seconds < (1 + TUNING.close) * self.standing.best]:
            self.ranking.solved.remove(solved)
            with contextlib.suppress(Infeasible):
                self._add(self._cut(solved))
        self.standing.waiting |= {c: bound for c, bound in self.solver.slow.bounds.items() if self.standing.may_win(bound)}

    def try_rest(self) -> None:
        """Solve what has no stages and was left, for memory's sake."""
        for candidate in [candidate for candidate in {**self.solver.slow.bounds, **self.standing.waiting} if candidate.stages == 1]:
            self._try(candidate, all_modes=True)

    # --- the walk ---

    def _run(self, progress: Progress | None) -> None:
        if not self.groups:
            self._bound_all(progress)
        for number, group in enumerate(self.groups):
            if progress:
                progress(number, len(self.groups), str(group[0]))
            if number < TUNING.beam:
                self._try_group(group)
        places = list(dict.fromkeys(s.candidate.place for s in self.ranking.solved))[:TUNING.nearest]
        near = [group for place in places for group in self.groups if group[0].place == place]
        for group in near or self.groups[:TUNING.beam]:
            self._walk(group)
        self._sweep()
        self._use_fewer(progress)
        self._split_further()
        self._count_all()
        self.standing.raise_least(functools.partial(surely, self.solver))
        self._look_closer()
        if progress:
            progress(len(self.groups), len(self.groups), "done")

    def _walk(self, group: Sequence[Candidate]) -> None:
        """Try fewer and more micro-batches than those of the best, as long as the step gets shorter or memory is short."""
        known = [s.candidate for s in self.ranking.solved if s.candidate in group]
        start = group.index(known[0] if known else self.places.representatives(group)[0][0])
        for fewer, others in ((True, group[:start][::-1]), (False, group[start + 1 :])):
            last = self._seconds(group[start])
            for candidate in others:
                if candidate in self.forbidden:
                    continue
                if candidate in self.standing.waiting and self.standing.promises(self.standing.waiting[candidate], candidate):
                    self._try(candidate)
                seconds = self._seconds(candidate)
                # What waits is above the best even without a limit of memory; what neither waits nor is solved does not fit.
                if seconds == math.inf and fewer != (candidate in self.standing.waiting):
                    break
                free = any(s.free for s in self.ranking.solved if s.candidate == candidate)
                if TUNING.rising * last < seconds < math.inf and (fewer or free):
                    break
                last = min(last, seconds)

    def _use_fewer(self, progress: Progress | None) -> None:
        """Try far fewer devices, where the arithmetic alone lets them be faster than the best: small models are slowed by each device."""
        request = self.request
        if self.fewest or not request.fewer or request.mesh is not None or request.cluster.devices > LARGE:
            return
        self.fewest = True
        if not self.ranking.solved:
            return  # what does not fit many devices does not fit fewer
        best, known = self.ranking.solved[0].seconds, len(self.groups)
        for devices in halves(request.cluster.devices):
            if self.solver.bounds.least_seconds(devices) < (1 - TUNING.close) * best:
                self._bound_groups(self.places.groups(devices), progress)
        self.groups[known:] = sorted(self.groups[known:], key=self.standing.of_group)
        for group in self.groups[known:]:
            self._try_group(group)
        self._sweep()

    def _sweep(self) -> None:
        """Solve what still promises to be better, the least bound first; of a mesh the fewest micro-batches, which bound the others."""
        for _ in range(TUNING.swept):
            promising = {c: bound for c, bound in self.standing.waiting.items() if self.standing.may_win(bound)}
            if not promising:
                break
            place = min(promising, key=lambda c: promising[c]).place
            self._try(min((c for c in promising if c.place == place), key=lambda c: c.micro_batches))

    def _seconds(self, candidate: Candidate) -> float:
        """The best of a candidate's solutions, infinite where there is none."""
        return min((s.seconds for s in self.ranking.solved if s.candidate == candidate), default=math.inf)

    def _try_group(self, group: Sequence[Candidate]) -> None:
        """Try the first candidates of a mesh that the pins do not forbid."""
        least = self.standing.of_group(group)
        for nearest in self.places.representatives(group):
            for candidate in nearest:
                if candidate in self.standing.waiting and self.standing.promises(least, candidate):
                    self._try(candidate)
                if candidate not in self.forbidden:
                    break

    # --- what is tried ---

    def _bound_all(self, progress: Progress | None) -> None:
        """The candidates of each mesh with their bounds, the least bounds first."""
        request, given = self.request, self.request.cluster.devices
        pairs = [
            pair
            for devices in (device_counts(given) if request.fewer and request.mesh is None else (given,))
            for pair in self.places.groups(devices)
        ]
        alone = [pair for pair in pairs if pair[0][0].stages == 1] if given <= LARGE else []
        staged = [pair for pair in pairs if pair not in alone]
        # By the arithmetic, should an interrupt come before they are bounded.
        self.standing.ahead = min((self.solver.bounds.least_waiting(c) for few, _ in staged for c in few), default=math.inf)
        self._bound_groups(alone, progress)
        self.groups.sort(key=self.standing.of_group)
        for group in self.groups if staged else ():
            self._try_group(group)
            if not (self.ranking.solved and self.ranking.solved[0].free):
                break  # memory is short: stages may be what helps
        self._bound_groups(staged, progress)
        self.groups.sort(key=self.standing.of_group)
        self.standing.ahead = math.inf

    def _bound_groups(self, pairs: Iterable[tuple[list[Candidate], list[Candidate]]], progress: Progress | None) -> None:
        """The candidates of some meshes (those worth trying, and all) with their bounds."""
        for few, every in pairs:
            if progress:
                progress(0, 1, str(few[0] if few else every[0]))
            if group := next(filter(None, map(self.standing.enter, (few, every))), None):
                self.groups.append(group)
            else:
                self.ranking.forbidden += 1

    def _try(self, candidate: Candidate, *, all_modes: bool = False) -> None:
        """Solve a candidate in the modes that may be the best: those that repeat one which the memory does not make slower are not.

        Modes whose time without a limit is above the best that is known are left out, unless `all_modes` are wanted.
        """
        found = self.ranking
        if not all_modes and self.standing.is_out(candidate):
            return
        left: list[Mode] = []
        done: list[Mode] = []
        tried: list[Mode] = []
        for mode in self.solver.modes(candidate.micro_batches):
            # On a mesh of one device nothing is gathered.
            same = candidate.mesh.devices == 1 and any(other.recompute == mode.recompute for other in tried)
            if same or any(mode.repeats(other) for other in (*left, *done)):
                continue
            tried.append(mode)
            below = (1 + TUNING.close) * found.solved[0].seconds if found.solved and not all_modes else math.inf
            try:
                solved = self.solver.solve(candidate, mode, below=below, far=math.inf if all_modes else self.standing.far(self.folded))
                cut = self._cut(solved) if solved is not None else None
            except Infeasible as error:
                needed = error.minimum_memory / candidate.stages
                found.misfits.append(Misfit(candidate=candidate, mode=mode, needed=needed))
                continue
            except NoAssignment:
                found.forbidden += 1
                self.forbidden.add(candidate)
                break
            if cut is None:
                left.append(mode)
                continue
            self._add(cut)
            done += [mode] if cut.free else []
        self.standing.waiting.pop(candidate, None)
        if left:
            self.standing.waiting[candidate] = found.solved[0].seconds
        self.standing.tighten(candidate)

    def _cut(self, solved: Solved) -> Solved:
        """What is expected to be near the best is ranked by its program, a pipeline by its cuts; raises `Infeasible` where none fits."""
        far = solved.seconds >= TUNING.cut * self.standing.best
        below = TUNING.variable * self.standing.best if self.solver.on_fronts else self.standing.beaten(self.folded)
        return solved if far else self.solver.cut(solved, below=below)

    def _add(self, solved: Solved) -> None:
        found = [*self.ranking.solved, solved]
        found.sort(key=lambda s: (s.seconds, s.candidate.stages, s.candidate.micro_batches, -s.candidate.devices))
        self.ranking.solved = needless_last(found)

    def _count_all(self) -> None:
        """Solve the best pipeline once more as if nothing of what parameters send were hidden: all its devices wait for the first one's."""
        best = self.ranking.solved[0] if self.ranking.solved else None
        if best is not None and best.candidate.stages > 1 and best.hidden:
            with contextlib.suppress(Infeasible, NoAssignment):
                other = self.solver.solve(best.candidate, best.mode, hidden=0.0)
                if other is not None:
                    self._add(self._cut(other))

    def _look_closer(self) -> None:
        """Where the bound leaves room for better programs: price those of what is somewhat behind the best, and vary the best of all."""
        if not self.folded.is_small or not self._is_open:
            return
        for solved in [s for s in self.ranking.solved if not s.exact and s.seconds < TUNING.closer * self.standing.best]:
            self.ranking.solved.remove(solved)
            with contextlib.suppress(Infeasible):
                self._add(self.solver.cut(solved, below=TUNING.closer * self.standing.best))
        first: dict[tuple[Candidate, Mode], Solved] = {}
        for solved in self.ranking.solved:
            first.setdefault((solved.candidate, solved.mode), solved)
        for key, solved in list(first.items())[: TUNING.varied]:
            below = TUNING.variable * self.standing.best
            if key not in self.varied and self._is_open and solved.seconds < below:
                self.varied.add(key)
                better = min(variations(self.solver, solved, below), key=lambda other: other.seconds, default=solved)
                if better.seconds < solved.seconds:
                    self._add(better)

    @property
    def _is_open(self) -> bool:
        """Whether the best that is known is brief, and so far above the bound that a better program may be found."""
        return TUNING.brief > self.standing.best > TUNING.open * self.standing.least

    def _split_further(self) -> None:
        """Split one axis of the best candidate's mesh in two; of the finer meshes the fastest counts, where it is faster than this one."""
        if self.request.mesh is not None or not self.ranking.solved:
            return
        best = self.ranking.solved[0]
        found = []
        every = meshes(best.candidate.cluster, best.candidate.stages)
        for mesh in [mesh for mesh in every if splits(best.candidate.mesh, mesh)][: TUNING.finer]:
            with contextlib.suppress(Infeasible, NoAssignment):
                found.append(self.solver.solve(replace(best.candidate, mesh=mesh), best.mode, below=best.seconds))
        fastest = min((solved for solved in found if solved is not None), key=lambda s: s.seconds, default=best)
        if fastest.seconds < (1 - TUNING.gain) * best.seconds:
            with contextlib.suppress(Infeasible):
                cut = self._cut(fastest)
                if cut.seconds < (1 - TUNING.gain) * best.seconds:
                    self._add(cut)
