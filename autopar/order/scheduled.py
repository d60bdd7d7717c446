"""A program under a schedule: its segments, the units of its parameters, and the actions of a step.

The steps of a program, apart from redistributions of parameters, are cut into *segments*: before
the first reader of each unit, and around recomputed stretches. A segment runs as one; between
segments parameters are gathered, released and reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir import Role
from autopar.sharding.mesh import Axes, degree_of
from autopar.sharding.program import (
    Bucket,
    Collective,
    Compute,
    Program,
    Redistribute,
    Step,
    chain_collectives,
    operator_collectives,
    scaling,
    speaks,
    summed_scales,
    talking,
)
from autopar.sharding.redistribution import changed_axes
from autopar.sharding.schedule import PLAIN, Schedule

from .actions import Action, Word
from .owners import owned_tensors, program_owners
from .passes import Need, expand, one_stage, phases
from .segments import Segment, segments_of, units_before
from .unit_collectives import UnitChains, gather_rounds, reduce_rounds, rounds_of
from .units import Mode, Unit, modes_of, units_of
from .value_flow import makes, reads, with_casts

__all__ = ["Mode", "Scheduled", "Segment", "makes", "reads", "scheduled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The program of one micro-batch with its segments, units and actions.

    `modes`: the mode of each redistribution of a parameter, by its step. `segments`: in the order
    in which they run. `chains`: of the units, made when they are first asked for.
    """

    program: Program
    schedule: Schedule
    modes: dict[int, Mode] = field(repr=False)
    units: tuple[Unit, ...] = field(repr=False)
    segments: tuple[Segment, ...] = field(repr=False)
    chains: UnitChains = field(repr=False, compare=False)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return bool(self.program.assignment.gradients)

    @property
    def updates_whole(self) -> bool:
        """Whether the optimizer updates whole matrices, each at its owner."""
        return bool(owned_tensors(self.program))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The sums of gradients, in the order in which they are started."""
        return tuple(itertools.chain.from_iterable(unit.buckets for unit in reversed(self.units)))

    @property
    def order(self) -> tuple[int, ...]:
        """All steps in the order of the forward pass, each unit's before the first segment that
        reads it.
        """
        seen: set[int] = set()
        steps: list[int] = []
        for segment in self.segments:
            new = [unit for unit in segment.units if unit not in seen]
            seen.update(new)
            steps += [index for unit in new for index in sorted(self.units[unit].members)]
            steps += segment.steps
        return tuple(steps)

    def needs(self) -> tuple[Need, ...]:
        """The units that each segment needs or completes."""
        first = self.reduced_at()
        return tuple(
            Need(
                forward=segment.units,
                backward=segment.wanted,
                reduced=tuple(u for u in reversed(range(len(self.units))) if first[u] == number),
                sets_off=(
                    bool(segment.leaving or segment.working),
                    bool(segment.arriving or segment.working),
                ),
            )
            for number, segment in enumerate(self.segments)
        )

    def gather_rounds(self, unit: int) -> int:
        """The rounds of gathering a unit; 0 if that changes no layout nor type of a parameter."""
        return rounds_of(self.chains.gather(unit))

    def reduce_rounds(self, unit: int, *, last: bool) -> int:
        """The rounds of reducing a unit's gradients, `last`: in a step's last micro-batch."""
        return rounds_of(self.chains.reduction(unit, last=last))

    def rests(self, unit: int, *, last: bool) -> bool:
        """Whether the last round of a reduction leaves nothing to take home.

        It is a sum in place, which frees no message, or nothing is sent.
        """
        chains = self.chains.reduction(unit, last=last)
        return bool(self.units[unit].buckets and last) or not any(c.count for c in chains)

    def reduced_at(self) -> list[int]:
        """The first segment that reads each unit.

        The unit's gradients are complete after the backward pass of that segment.
        """
        first = [0] * len(self.units)
        for number in reversed(range(len(self.segments))):
            for unit in self.segments[number].units:
                first[unit] = number
        return first

    def followers(self) -> dict[int, set[int]]:
        """Units that start from each unit's values; their gradients are reduced before its own."""
        unit_of = {index: unit.number for unit in self.units for index in unit.members}
        followers: dict[int, set[int]] = {}
        for number, before in units_before(self.program, self.modes, unit_of).items():
            for unit in before - {number}:
                followers.setdefault(unit, set()).add(number)
        return followers

    def value_groups(self) -> frozenset[Axes]:
        """The groups of ranks, by their axes, that exchange values and their gradients."""
        steps = self.program.steps
        mesh = self.program.assignment.mesh.shape
        inside = (
            (*talking(step.decision), *filter(None, scaling(self.program.graph, step, mesh)))
            for step in steps
            if isinstance(step, Compute) and speaks(step)
        )
        between = (index for index in range(len(steps)) if index not in self.modes)
        return self._of_several((*itertools.chain.from_iterable(inside), *self._changed(between)))

    def unit_groups(self) -> frozenset[Axes]:
        """The groups of ranks, by their axes, that gather parameters and reduce gradients."""
        return self._of_several(self._changed(self.modes))

    def shared_groups(self) -> frozenset[Axes]:
        """The groups over which both travel: there parameters have a communicator of their own."""
        return self.value_groups() & self.unit_groups()

    def _changed(self, indices: Iterable[int]) -> Iterator[Axes]:
        for index in indices:
            step = self.program.steps[index]
            if isinstance(step, Redistribute):
                yield from itertools.starmap(changed_axes, itertools.pairwise(step.chain))
                mesh = self.program.assignment.mesh.shape
                yield from (s.axes for s in summed_scales(self.program.graph, step, mesh))

    def _of_several(self, groups: Iterable[Axes]) -> frozenset[Axes]:
        mesh = self.program.assignment.mesh.shape
        return frozenset(axes for axes in groups if degree_of(axes, mesh) > 1)

    def actions(self) -> tuple[Action, ...]:
        """The order of a step without pipeline stages."""
        return expand(
            {0: self},
            one_stage(self.schedule.micro_batches, train=self.trains, merges=self.schedule.merges),
            prefetch=self.schedule.prefetch,
        )

    def issued(self, action: Action) -> tuple[Collective, ...]:
        """The collectives of an action other than a send; those of a segment's backward pass are
        unordered.
        """
        last = action.micro_batch == self.schedule.micro_batches - 1
        match action.word:
            case Word.GATHER:
                assert action.unit is not None
                return _round(gather_rounds(self.program, self.chains.gather(action.unit)), action)
            case Word.REDUCE:
                assert action.unit is not None
                chains = self.chains.reduction(action.unit, last=last)
                return _round(reduce_rounds(self.program, chains, self.schedule.types), action)
            case Word.FORWARD:
                return self._segment(action)[0]
            case Word.BACKWARD | Word.BACKWARD_INPUT:
                ahead, back = self._segment(action)
                assert action.segment is not None
                # What is computed again repeats its collectives before any gradient flows.
                repeated = (
                    tuple(_back(c) for c in ahead)
                    if self.segments[action.segment].recomputed
                    else ()
                )
                return (*repeated, *back)
            case Word.UPDATE:
                owners = program_owners(self.program)
                return (*owners.gathers(), *owners.returns())
        return ()

    def _segment(self, action: Action) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        assert action.segment is not None
        segment = self.segments[action.segment]
        steps = self.program.steps
        mesh = self.program.assignment.mesh.shape
        each = {i: _collectives(self.program, steps[i], mesh) for i in segment.steps}
        for i in segment.working:
            ahead, back = each[i]
            # The rows set off in the segment before, and the gradients of the results behind it.
            each[i] = ahead[set_off(ahead) :], back[1:]
        # These layers are steps of other segments, which have the rest of their collectives.
        leaving = [_collectives(self.program, steps[i], mesh)[0] for i in segment.leaving]
        arriving = [_collectives(self.program, steps[i], mesh)[1] for i in segment.arriving]
        forward = [pair[0] for pair in each.values()] + [c[: set_off(c)] for c in leaving]
        backward = [pair[1] for pair in reversed(each.values())] + [c[:1] for c in arriving]
        return (
            tuple(itertools.chain.from_iterable(forward)),
            tuple(itertools.chain.from_iterable(backward)),
        )

    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step without pipeline stages, in the order of its actions."""
        known: dict[tuple[object, ...], tuple[Collective, ...]] = {}
        issued: list[Collective] = []
        actions = self.actions()
        for action, phase in zip(actions, phases(actions), strict=True):
            # Micro-batches differ only in whether they are the last, so one serves the others.
            key = (
                action.word,
                action.segment,
                action.unit,
                action.round,
                action.micro_batch == self.schedule.micro_batches - 1,
            )
            if key not in known:
                known[key] = self.issued(action)
            issued += known[key] if phase == "forward" else map(_back, known[key])
        if self.updates_whole:
            issued += self.issued(Action(word=Word.UPDATE))
        return tuple(issued)


def scheduled(program: Program, schedule: Schedule = PLAIN) -> Scheduled:
    """Put a program under a schedule; `PlanError` if that names operators it does not hold."""
    # First, as casts are redistributions, which belong to units like all others.
    program = with_casts(program, schedule.types)
    modes = modes_of(program, schedule)
    units = units_of(program, schedule, modes)
    return Scheduled(
        program=program,
        schedule=schedule,
        modes=modes,
        units=units,
        segments=segments_of(program, schedule, modes, units),
        chains=UnitChains(program, units),
    )


def _round(issued: Sequence[Sequence[Collective]], action: Action) -> tuple[Collective, ...]:
    """The collectives of the round of an action; the one behind the last issues nothing."""
    assert action.round is not None
    return tuple(issued[action.round]) if action.round < len(issued) else ()


def set_off(ahead: Sequence[Collective]) -> int:
    """The collectives with which the rows of a layer of experts set off: up to the first exchange
    that is not one of counts.
    """
    return next(i for i, c in enumerate(ahead) if c.kind == "all_to_all") + 1


def _back(c: Collective) -> Collective:
    return replace(c, phase="backward")


def _collectives(
    program: Program, step: Step, mesh: tuple[int, ...]
) -> tuple[list[Collective], list[Collective]]:
    """The collectives of a step forward, and of its backward pass, each in the order of issue."""
    if isinstance(step, Redistribute):
        # These are issued by the actions of units, not by passes.
        if program.graph.tensors[step.tensor].role is Role.PARAMETER:
            return [], []
        ahead, back = chain_collectives(program.graph, step, mesh)
        return ahead, back[::-1]
    if not speaks(step):
        return [], []
    inside = operator_collectives(program.graph, step, mesh, program.assignment.gradients)
    return [c for c in inside if c.phase == "forward"], [c for c in inside if c.phase == "backward"]
