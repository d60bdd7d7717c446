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
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.search import Infeasible, NoAssignment

from .candidates import LARGE, Candidate, device_counts, halves, meshes, splits
from .places import Places
from .proof import prove
from .ranking import Misfit, Progress, Ranking
from .request import Request
from .solved import Mode, Solved
from .subject import Subject
from .trials import Trials
from .tuning import TUNING


class Outer:
    """The walk over the candidates of a request; `waiting`: those that are left, with their bounds; `sure`: bounds of all."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request
        self.trials = Trials(subject, request)
        self.places = Places(subject, request, self.trials.bounds)
        self.ranking = Ranking()
        self.groups: list[list[Candidate]] = []
        self.waiting: dict[Candidate, float] = {}
        self.sure: dict[Candidate, float] = {}
        self.forbidden: set[Candidate] = set()
        self.fewest = False

    def run(self, progress: Progress | None = None) -> Ranking:
        """Solve every mesh for one number of micro-batches, the best for others, and the best of all on finer meshes.

        Interrupted, it leaves what it has found, if anything, with a bound for all that is left. Run again, it goes on with what waits.
        """
        found = self.ranking
        try:
            self._run(progress)
        except KeyboardInterrupt:
            if self.trials.left is not None:
                self._add(self.trials.left)
            if not found.solved:
                raise
            found.complete = False
        found.bound = min([*self.sure.values(), *(s.seconds for s in found.solved[:1])], default=0.0)
        return found

    def settle(self, evaluated: Mapping[Solved, float]) -> None:
        """Replace what solutions promised by the seconds of their programs (infinite: none fits the memory)."""
        kept, self.ranking.solved = self.ranking.solved, []
        for solved in kept:
            if (seconds := evaluated.get(solved, solved.seconds)) < math.inf:
                self._add(replace(solved, seconds=seconds))

    def try_rest(self) -> None:
        """Solve what has no stages and was left, for memory's sake."""
        for candidate in [candidate for candidate in self.waiting if candidate.stages == 1]:
            self._try(candidate, all_modes=True)

    # --- the walk ---

    def _run(self, progress: Progress | None) -> None:
        if not self.groups:
            self._bound_all(progress)
        for number, group in enumerate(self.groups):
            if progress:
                progress(number, len(self.groups), str(group[0]))
            least = self._group_bound(group)
            for nearest in self.places.representatives(group) if number < TUNING.beam else ():
                self._try_first(nearest, least)
        places = list(dict.fromkeys(s.candidate.place for s in self.ranking.solved))[:TUNING.nearest]
        near = [group for place in places for group in self.groups if group[0].place == place]
        for group in near or self.groups[:TUNING.beam]:
            self._walk(group)
        self._sweep()
        self._use_fewer(progress)
        self._split_further()
        self._count_all()
        prove(self.sure, self.trials.bounds, self.ranking.solved[0].seconds if self.ranking.solved else math.inf)
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
                if candidate in self.waiting and self._promises(self.waiting[candidate], candidate):
                    self._try(candidate)
                seconds = self._seconds(candidate)
                # What waits is above the best even without a limit of memory; what neither waits nor is solved does not fit.
                if seconds == math.inf and fewer != (candidate in self.waiting):
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
            if self.trials.bounds.least_seconds(devices) < (1 - TUNING.close) * best:
                self._bound_devices(devices, progress)
        self.groups[known:] = sorted(self.groups[known:], key=self._group_bound)
        for group in self.groups[known:]:
            least = self._group_bound(group)
            for nearest in self.places.representatives(group):
                self._try_first(nearest, least)
        self._sweep()

    def _group_bound(self, group: Sequence[Candidate]) -> float:
        return min((self.waiting[candidate] for candidate in group if candidate in self.waiting), default=math.inf)

    def _sweep(self) -> None:
        """Solve what still promises to be better, the least bound first; of a mesh the fewest micro-batches, which bound the others."""
        for _ in range(TUNING.swept):
            best = self.ranking.solved[0].seconds if self.ranking.solved else math.inf
            promising = {c: bound for c, bound in self.waiting.items() if bound < (1 - TUNING.close) * best}
            if not promising:
                break
            place = min(promising, key=lambda c: promising[c]).place
            self._try(min((c for c in promising if c.place == place), key=lambda c: c.micro_batches))

    def _seconds(self, candidate: Candidate) -> float:
        """The best of a candidate's solutions, infinite where there is none."""
        return min((s.seconds for s in self.ranking.solved if s.candidate == candidate), default=math.inf)

    def _try_first(self, nearest: Sequence[Candidate], least: float) -> None:
        """Try the first of some candidates of one mesh that the pins do not forbid."""
        for candidate in nearest:
            if candidate in self.waiting and self._promises(least, candidate):
                self._try(candidate)
            if candidate not in self.forbidden:
                break

    def _promises(self, bound: float, candidate: Candidate) -> bool:
        """Whether a candidate may be better than the best by more than `close`; without stages, whether it may be as near to it."""
        solved = self.ranking.solved
        return not solved or bound < (1 - TUNING.close if candidate.stages > 1 else 1 + TUNING.close) * solved[0].seconds

    # --- what is tried ---

    def _bound_all(self, progress: Progress | None) -> None:
        """The candidates of each mesh with their bounds, the least bounds first."""
        request = self.request
        for devices in device_counts(request.cluster.devices) if request.fewer and request.mesh is None else (request.cluster.devices,):
            self._bound_devices(devices, progress)
        self.groups.sort(key=self._group_bound)

    def _bound_devices(self, devices: int, progress: Progress | None) -> None:
        """The candidates of so many devices with their bounds."""
        for few, every in self.places.groups(devices):
            if progress:
                progress(0, 1, str(few[0] if few else every[0]))
            if group := next(filter(None, map(self._bound_group, (few, every))), None):
                self.groups.append(group)
            else:
                self.ranking.forbidden += 1

    def _bound_group(self, group: Sequence[Candidate]) -> list[Candidate]:
        """Bound the candidates of a mesh; those that are left: the pins may forbid the first numbers of micro-batches (12 samples on 4
        devices are 3 times 4, but not 2 times 6)."""
        for number, first in enumerate(group):
            try:
                found = {candidate: self.trials.bounds.bound(candidate, first.micro_batches) for candidate in group[number:]}
            except NoAssignment:
                continue
            self.waiting.update(found)
            self.sure.update(found)
            return list(found)
        return []

    def _try(self, candidate: Candidate, *, all_modes: bool = False) -> None:
        """Solve a candidate in the modes that may be the best: those that repeat one which the memory does not make slower are not.

        Modes whose time without a limit is above the best that is known are left out, unless `all_modes` are wanted.
        """
        found = self.ranking
        left: list[Mode] = []
        done: list[Mode] = []
        bounds: list[float] = []
        for mode in self.trials.modes(candidate.micro_batches):
            if any(mode.repeats(other) for other in (*left, *done)):
                continue
            below = (1 + TUNING.close) * found.solved[0].seconds if found.solved and not all_modes else math.inf
            try:
                solved = self.trials.solve(candidate, mode, below=below)
                cut = self._cut(solved) if solved is not None else None
            except Infeasible as error:
                needed = error.minimum_memory / candidate.stages
                found.misfits.append(Misfit(candidate=candidate, mode=mode, needed=needed))
                continue
            except NoAssignment:
                found.forbidden += 1
                self.forbidden.add(candidate)
                break
            bounds.append(below if cut is None else self.trials.surely(cut))
            if cut is None:
                left.append(mode)
                continue
            self._add(cut)
            done += [mode] if cut.free else []
        if candidate.stages == 1:  # where no stages are cut, what fits in no mode does not fit
            self.sure[candidate] = max(self.sure[candidate], min(bounds, default=math.inf))
        self.waiting.pop(candidate, None)
        if left:
            self.waiting[candidate] = found.solved[0].seconds
        self._tighten(candidate)

    def _tighten(self, candidate: Candidate) -> None:
        """Bound those that wait with more micro-batches on the same mesh, as these are no faster."""
        if candidate not in self.trials.bounds.free:
            return
        for other, bound in self.waiting.items():
            if other.place == candidate.place and other.micro_batches > candidate.micro_batches:
                self.waiting[other] = max(bound, self.trials.bounds.bound(other, candidate.micro_batches))

    def _cut(self, solved: Solved) -> Solved:
        """What is expected to be near the best is ranked by its program, a pipeline by its cuts; raises `Infeasible` where none fits."""
        best = self.ranking.solved[:1]
        far = bool(best) and solved.seconds >= TUNING.cut * best[0].seconds
        return solved if far else self.trials.cut(solved)

    def _add(self, solved: Solved) -> None:
        self.ranking.solved.append(solved)
        self.ranking.solved.sort(key=lambda s: (s.seconds, s.candidate.stages, s.candidate.micro_batches, -s.candidate.devices))

    def _count_all(self) -> None:
        """Solve the best pipeline once more as if nothing of what parameters send were hidden: all its devices wait for the first one's."""
        best = self.ranking.solved[0] if self.ranking.solved else None
        if best is not None and best.candidate.stages > 1 and best.hidden:
            with contextlib.suppress(Infeasible, NoAssignment):
                other = self.trials.solve(best.candidate, best.mode, hidden=0.0)
                if other is not None:
                    self._add(self._cut(other))

    def _split_further(self) -> None:
        """Split one axis of the best candidate's mesh in two; of the finer meshes the fastest counts, where it is faster than this one."""
        if self.request.mesh is not None or not self.ranking.solved:
            return
        best = self.ranking.solved[0]
        found = []
        every = meshes(best.candidate.cluster, best.candidate.stages)
        for mesh in [mesh for mesh in every if splits(best.candidate.mesh, mesh)][: TUNING.finer]:
            with contextlib.suppress(Infeasible, NoAssignment):
                found.append(self.trials.solve(replace(best.candidate, mesh=mesh), best.mode, below=best.seconds))
        fastest = min((solved for solved in found if solved is not None), key=lambda s: s.seconds, default=best)
        if fastest.seconds < (1 - TUNING.gain) * best.seconds:
            with contextlib.suppress(Infeasible):
                cut = self._cut(fastest)
                if cut.seconds < (1 - TUNING.gain) * best.seconds:
                    self._add(cut)
