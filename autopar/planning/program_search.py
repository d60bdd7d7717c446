"""From the ranking to a plan: the most promising solutions on the whole graph, their programs priced to the last collective."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from autopar.search import Infeasible, Interrupted, NoAssignment

from ..errors import NoPlanFits, UsageError
from .alike import Alike
from .candidates import Candidate
from .least_needed import least_hosted, least_needed
from .pipeline_search import StagedProgram
from .priced_program import DraftProgram, PricedProgram, evaluate, smallest
from .ranking import Progress, first_of
from .request import HEADROOM
from .solved_candidate import Mode, Solved
from .solving import solve_within
from .tuning import TUNING
from .walk import Walk
from .whole_programs import WholePrograms


def _nothing(walk: Walk) -> str:
    """Why there is no candidate at all."""
    request = walk.request
    if walk.ranking.forbidden:
        where = f"on the mesh {request.mesh}" if request.mesh is not None else "on any mesh of these devices"
        return f"the pins leave no strategy for some operator {where}"
    if request.micro_batches not in (None, 1):
        reason = walk.folded.why_not(request.micro_batches) or "the stages, or their schedule, cannot run them"
        return f"{request.micro_batches} micro-batches: {reason}"
    if request.stages is not None:
        return f"{request.stages} stages do not divide {request.cluster.devices} devices, or are more than the layers of the model"
    return f"the mesh {request.mesh} does not have {request.cluster.devices} devices"


class ProgramSearch:
    """Solves ranked candidates on the whole graph and prices their programs."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.solver, self.folded, self.request = walk, walk.solver, walk.folded, walk.request
        self.failures: list[Infeasible] = []
        self.done: set[tuple[Candidate, Mode]] = set()
        self.progress: Progress | None = None
        self.programs = WholePrograms(self.solver, self._note)
        self.alike = Alike(self.folded, self.request, self.solver.always)

    def _note(self, candidate: Candidate) -> None:
        if self.progress:
            self.progress(len(self.walk.groups), len(self.walk.groups), str(candidate))

    def best(self, progress: Progress | None = None) -> PricedProgram | StagedProgram:
        """The best program among the solutions; where none fits the memory, the first of the thriftiest that does.

        Where programs fall short of what their solutions promised, what these had kept out is looked at. Raises `NoPlanFits`, and
        `UsageError` where there is no candidate at all.
        """
        walk, self.progress = self.walk, progress
        if not walk.ranking.solved and not walk.ranking.misfits:
            raise UsageError(_nothing(walk))
        found: list[PricedProgram | StagedProgram] = []
        for _ in range(TUNING.rounds):
            evaluated = self._evaluate(found)
            walk.settle(evaluated)
            kept = all(seconds <= TUNING.short * solved.seconds for solved, seconds in evaluated.items())
            if kept or not walk.ranking.complete or not walk.run().complete:
                break
        if not found and walk.ranking.complete:
            walk.try_rest()
            self._evaluate(found)
        found += self._unlimited(found)
        found += self._stored_whole(found)
        if not found:
            found = self._thriftiest()
        if not found:
            raise self._no_plan()
        near = TUNING.mixed * first_of(found).seconds if walk.ranking.complete else 0.0
        return first_of([self.alike.best(one, walk.ranking.solved)[0] if one.seconds <= near else one for one in found])

    def _unlimited(self, found: list[PricedProgram | StagedProgram]) -> Iterator[PricedProgram]:
        """Programs without stages that fit after all, of solutions for which the tables had no room."""
        best = min((f.seconds for f in found), default=math.inf)
        solver = self.solver
        free = {s.candidate for s in self.walk.ranking.solved if s.free and s.mode == next(solver.modes(s.candidate.micro_batches))}
        near = {c for c, needed in solver.needed.items() if needed <= TUNING.hopeful * solver.room(c)}
        left = [c for c, seconds in solver.bounds.free.items() if c.stages == 1 and seconds < best and c not in free and c in near]
        for candidate in sorted(left, key=lambda c: solver.bounds.free[c])[: TUNING.evaluated if self.walk.ranking.complete else 0]:
            first = next(solver.modes(candidate.micro_batches))
            whole = replace(first, zero=0) if self.request.zero is None and self.request.train else first
            for mode, hidden in dict.fromkeys((m, h) for m in (first, whole) for h in (solver.hides(candidate, m), 0.0)):
                tables = self.programs.tables(candidate, mode, hidden)
                try:
                    solution = solve_within(tables, self.request.method, math.inf)
                except Infeasible:  # not within the hosts' memory
                    continue
                if solution.memory <= TUNING.hopeful * solver.room(candidate):
                    draft = DraftProgram.of(tables, solution, self.programs.schedule(candidate, mode))
                    if draft.memory.total <= solver.memory_limit(candidate):
                        yield draft.priced()

    def _stored_whole(self, found: list[PricedProgram | StagedProgram]) -> list[PricedProgram | StagedProgram]:
        """The best program with all parameters stored whole, where that may be as fast: the copies of gathers are in no table."""
        if not found or self.request.zero is not None or not self.request.train or not self.walk.ranking.complete:
            return []
        best = first_of(found)
        mesh, stages = (best.assignment.mesh, 1) if isinstance(best, PricedProgram) else (best.parts[0].group.mesh, best.stages)
        place = mesh, stages, best.schedule.micro_batches
        near = TUNING.stored if self.solver.on_fronts else TUNING.whole
        here = [s for s in self.walk.ranking.solved if (s.candidate.mesh, s.candidate.stages, s.candidate.micro_batches) == place]
        others = [s for s in here if self.solver.on_fronts and s.seconds < near * best.seconds]
        made, modes = [], dict.fromkeys((s.candidate, replace(s.mode, zero=0)) for s in (*here[:1], *others))
        for candidate, mode in list(modes)[: TUNING.evaluated]:
            with contextlib.suppress(Infeasible, NoAssignment):
                whole = self.solver.solve(candidate, mode)
                whole = self.solver.cut(whole) if whole is not None and stages > 1 else whole
                if whole is not None and whole.seconds < near * best.seconds:
                    made.append(self.programs.best(whole))
        return made

    def _evaluate(self, found: list[PricedProgram | StagedProgram]) -> dict[Solved, float]:
        """Add the programs of the most promising solutions, at least `evaluated` in all; the seconds of each (infinite: none fits)."""
        evaluated: dict[Solved, float] = {}
        most = TUNING.tried if self.folded.is_small else TUNING.tried // 2
        short = self.solver.on_fronts and bool(self.walk.ranking.solved) and not self.walk.ranking.solved[0].free
        ranked = [s for s in (self.walk.ranking.solved if short else self._ranked()) if (s.candidate, s.mode) not in self.done][:most]
        for solved in ranked:
            near = solved.seconds < TUNING.near * ranked[0].seconds and len(found) < TUNING.close_calls and self.folded.is_small
            best = min((f.seconds for f in found), default=math.inf)
            # What is near the best of a large graph was ranked by its program.
            several = len(found) >= (TUNING.evaluated if self.folded.is_small else 1)
            enough = solved.seconds >= best and (several or solved.seconds >= TUNING.far * best)
            if short and solved.seconds < TUNING.far * best and len(found) < TUNING.close_calls:
                near = True  # of the whole graph layers may be unlike, which the walk does not know
            if not near and (enough or (len(found) > TUNING.evaluated and not self.folded.is_small and solved.seconds >= best)):
                break
            self.done.add((solved.candidate, solved.mode))
            try:
                made = self.programs.best(solved)
                found.append(made)
                evaluated[solved] = made.seconds
                if solved.free and made.tightened and (self.folded.is_small or solved.candidate.stages == 1):
                    found += self._other_modes(solved, made.seconds)
            except Infeasible as error:
                evaluated[solved] = math.inf
                self.failures += [error] if solved.candidate.stages == 1 else []
            except KeyboardInterrupt as interrupt:
                self.walk.ranking.complete = False
                found += self._interrupted(solved, interrupt)
                if not found:
                    raise
                break
        return evaluated

    def _other_modes(self, solved: Solved, seconds: float) -> Iterator[PricedProgram | StagedProgram]:
        """The programs of a candidate in other modes, where these promise to be faster: memory was not as free as the tables had it."""
        for mode in self.solver.modes(solved.candidate.micro_batches):
            if mode == solved.mode:
                continue
            try:
                other = self.solver.solve(solved.candidate, mode)
                if other is not None and other.seconds < seconds:
                    yield self.programs.best(other)
            except Infeasible:
                continue

    def _interrupted(self, solved: Solved, interrupt: KeyboardInterrupt) -> list[PricedProgram | StagedProgram]:
        """What an interrupted search of the whole graph had found, if it fits the memory."""
        if not isinstance(interrupt, Interrupted) or interrupt.best is None or solved.candidate.stages > 1:
            return []
        schedule = self.programs.schedule(solved.candidate, solved.mode)
        found = evaluate(self.programs.tables(solved.candidate, solved.mode), interrupt.best, schedule)
        return [found] if found.estimate.memory.total <= self.solver.memory_limit(solved.candidate) else []

    def _ranked(self) -> list[Solved]:
        """The solved candidates by what the tables say; first the cheapest mode of each of the `evaluated` best."""
        solved = [entry for entry in self.walk.ranking.solved if not entry.uncut]
        first = list({entry.candidate: entry for entry in reversed(solved)}.values())
        first = sorted(first, key=solved.index)[:TUNING.evaluated]
        return first + [entry for entry in solved if entry not in first]

    def _thriftiest(self) -> list[PricedProgram | StagedProgram]:
        """Of the candidates without stages that need least memory, the first whose program fits."""
        ranking = self.walk.ranking
        misfits = [(misfit.needed, misfit.candidate, misfit.mode) for misfit in ranking.misfits]
        solved = [(solved.solution.memory, solved.candidate, solved.mode) for solved in ranking.solved]
        alone = sorted((entry for entry in (*misfits, *solved) if entry[1].stages == 1), key=lambda entry: entry[0])
        # The tables misjudge each number of micro-batches in its own way: all of them have their turn.
        place: Counter[int] = Counter()
        turns: list[tuple[int, int, tuple[float, Candidate, Mode]]] = []
        for entry in alone:
            turns.append((place[entry[1].micro_batches], len(turns), entry))
            place[entry[1].micro_batches] += 1
        looked = 0
        most = 2 * TUNING.tried if self.folded.is_small else TUNING.tried
        for _, _, (_, candidate, mode) in sorted(turns, key=lambda turn: turn[:2])[:most]:
            # What cannot fit is looked at only for the size that would do, and that of the first ones is as good as any.
            sure = looked < TUNING.evaluated or self.folded.is_small
            if not sure and least_needed(self.solver, candidate, mode) > TUNING.likely * self.solver.memory_limit(candidate):
                continue
            looked += 1
            try:
                schedule = self.programs.schedule(candidate, mode)
                tables = self.programs.tables(candidate, mode)
                return [smallest(tables, method=self.request.method, memory_limit=self.solver.memory_limit(candidate), schedule=schedule)]
            except Infeasible as error:
                self.failures.append(error)
        return []

    def _no_plan(self) -> NoPlanFits:
        # What stages would need is estimated, not shown by a plan: it is named only where there is nothing else.
        best_pipeline = [misfit.needed + self.solver.always for misfit in self.walk.ranking.misfits]
        request = self.request
        memory_limit, held = request.memory_limit, request.host_on(request.cluster)
        needed = min((error.minimum_memory for error in self.failures), default=min(best_pipeline, default=memory_limit))
        pinned = request.offload == "optimizer" and math.isfinite(held)
        hosted = least_hosted(self.solver) if pinned else 0.0
        where = f"on {request.cluster.devices} devices"
        if hosted > held or (pinned and math.isinf(needed)):
            said = (
                f"no plan fits the hosts {where}: the optimizer's state takes at least {_size(hosted)} of host memory for each device, and "
                f"{_size(held)} are there. Give more devices, --optimizer sgd, or let some of it stay on the devices (without --offload)."
            )
            return NoPlanFits(said, minimum=max(needed, memory_limit), memory_limit=memory_limit)
        hosts = f" With --offload optimizer all its state has to fit the {_size(held)} of host memory for each device." if pinned else ""
        master = request.types.master
        stored = f" Parameters in the type of the computation (--master) take less than in {master}." if master else ""
        free = request.cluster.device.usable_memory
        spare = f" ({_size(free)} but for {HEADROOM:.0%} of headroom, which --memory overrules)" if request.memory is None else ""
        certain = needed > memory_limit * (1 + TUNING.certain)
        enough = f"the smallest that would do is {_size(needed)}" if certain else "a little more would do"
        said = f"no plan fits {_size(memory_limit)} per device{spare} {where}; {enough}."
        instead = "Give more devices or memory, a smaller --batch, or --optimizer sgd."
        return NoPlanFits(f"{said} {instead}{hosts}{stored}", minimum=max(needed, memory_limit), memory_limit=memory_limit)


def _size(nbytes: float) -> str:
    """Bytes rounded up to three digits, so that the size named is enough."""
    if math.isinf(nbytes):
        return "any memory"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{math.ceil(nbytes / unit * 1000) / 1000:.3f} {name}"
    return f"{math.ceil(nbytes)} bytes"
