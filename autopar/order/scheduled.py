"""A program under a schedule: which of its steps run once a step, with every micro-batch, or again in the backward pass.

A parameter's redistribution (its gather, and the reduction of its gradient) has one of three modes:

    mode      value                                gradient
    once      made once a step, kept               added up as it is used, brought home once a step
    shards    made once a step, kept               brought home and added up after every micro-batch       (ZeRO 2)
    again     made for every forward and once      brought home and added up after every micro-batch       (ZeRO 3)
              more for every backward pass

Only what gathers is ever made again or brought home often; the rest costs nothing on the way to its value, and is done once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ..errors import PlanError
from ..ir import Role
from ..sharding.layout import Kind, Layout
from ..sharding.program import Collective, Compute, Program, Redistribute, Step, chain_collectives, operator_collectives
from ..sharding.redistribution import changed_axis, transfers
from ..sharding.rules import RULES, Call
from ..sharding.rules.saved import keeps, shares_memory
from ..sharding.schedule import PLAIN, Schedule

Place = tuple[str, Layout]


class Mode(StrEnum):
    """How often a parameter's redistribution runs."""

    ONCE = "once"
    SHARDS = "shards"
    AGAIN = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive steps, by their index in the program; with `again` their values are not kept but made again in the backward pass."""

    steps: tuple[int, ...]
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The program of one micro-batch, and how a step is made of it.

    `modes`: of the redistributions of parameters, by step. `parts`: the steps in the order in which they run. `regathered`: for the step
    of an operator, the redistributions in mode "again" whose values it needs in the backward pass, the first to do so there.
    """

    program: Program
    schedule: Schedule
    modes: dict[int, Mode] = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)
    regathered: dict[int, tuple[int, ...]] = field(repr=False)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return bool(self.program.assignment.gradients)

    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of one training step (or one inference): micro-batch after micro-batch, then the gradient buckets."""
        lists = _Lists(self)
        found: list[Collective] = []
        last = self.schedule.micro_batches - 1
        for number in range(last + 1):
            found += lists.forward(first=number == 0)
            if self.trains:
                found += lists.backward(last=number == last)
        for bucket in self.program.buckets:
            name = bucket.parameters[0]
            found += [Collective(phase="backward", kind="all_reduce", axis=axis, nbytes=bucket.nbytes, tensor=name) for axis in bucket.axes]
        return tuple(found)


def scheduled(program: Program, schedule: Schedule = PLAIN) -> Scheduled:
    """Put a program under a schedule; `PlanError` where that names operators which the program does not hold."""
    modes = _modes(program, schedule)
    parts = _parts(program, schedule, modes)
    regathered = _regathered(program, modes, parts) if program.assignment.gradients else {}
    return Scheduled(program=program, schedule=schedule, modes=modes, parts=parts, regathered=regathered)


def _modes(program: Program, schedule: Schedule) -> dict[int, Mode]:
    """A chain that starts from what another one gave runs as often as that."""
    order = list(Mode)
    gathered = Mode.AGAIN if schedule.gathered == "again" else Mode.SHARDS if schedule.accumulated == "shards" else Mode.ONCE
    found: dict[int, Mode] = {}
    of_place: dict[Place, Mode] = {}
    mesh = program.assignment.mesh.shape
    for index, step in enumerate(program.steps):
        if isinstance(step, Redistribute) and program.graph.tensors[step.tensor].role is Role.PARAMETER:
            own = gathered if gathers(step, mesh) else Mode.ONCE
            mode = max(own, of_place.get((step.tensor, step.chain[0]), Mode.ONCE), key=order.index)
            found[index] = of_place[step.tensor, step.chain[-1]] = mode
    return found


def gathers(step: Redistribute, mesh: tuple[int, ...]) -> bool:
    """Whether a redistribution communicates on the way to its value."""
    pairs = ((before, after, changed_axis(before, after)) for before, after in itertools.pairwise(step.chain))
    return any(transfers(before[axis], after[axis], mesh[axis])[0] is not None for before, after, axis in pairs)


def kept_steps(plan: Scheduled) -> tuple[int, ...]:
    """The redistributions of parameters whose values stay from one micro-batch to the next."""
    if plan.schedule.micro_batches == 1:
        return ()
    moved = (index for index, mode in plan.modes.items() if mode is not Mode.AGAIN)
    return tuple(index for index in moved if not _is_free(plan.program.steps[index]))


def _is_free(step: Step) -> bool:
    """Whether a redistribution leaves the value where it is: each step of its chain is R to B or none at all."""
    assert isinstance(step, Redistribute)
    pairs = itertools.pairwise(step.chain[step.bucketed :])
    moved = ((before[axis], after[axis]) for before, after in pairs for axis in (changed_axis(before, after),))
    return all(Kind.SPLIT not in (before.kind, after.kind) and after.kind is not Kind.PARTIAL for before, after in moved)


def reads(step: Step) -> tuple[Place, ...]:
    """What a step reads."""
    if isinstance(step, Redistribute):
        return ((step.tensor, step.chain[0]),)
    return tuple(zip(step.operator.inputs, step.decision.inputs, strict=True))


def makes(step: Step) -> tuple[Place, ...]:
    """What a step makes."""
    if isinstance(step, Redistribute):
        return ((step.tensor, step.chain[-1]),)
    return tuple(zip(step.operator.outputs, step.decision.outputs, strict=True))


def _segments(program: Program, schedule: Schedule, modes: dict[int, Mode]) -> list[int]:
    """The segment of every step, or -1. A redistribution belongs to the operator behind it; a parameter's, if it is made again anyway."""
    named = Counter(name for segment in schedule.recompute for name in segment)
    known = {step.operator.name for step in program.steps if isinstance(step, Compute)}
    if wrong := [name for name, count in named.items() if count > 1 or name not in known]:
        raise PlanError(f"the plan recomputes {', '.join(map(repr, wrong[:5]))}: not in the model, or named twice")
    segment_of = {name: number for number, segment in enumerate(schedule.recompute) for name in segment}
    readers: dict[Place, list[int]] = {}
    for index, step in enumerate(program.steps):
        for place in reads(step):
            readers.setdefault(place, []).append(index)
    outputs = set(program.assignment.outputs.items())
    found, behind = [-1] * len(program.steps), -1
    for index in reversed(range(len(program.steps))):
        step = program.steps[index]
        if isinstance(step, Compute):
            behind = segment_of.get(step.operator.name, -1)
        found[index] = behind
        if index in modes:
            (place,) = makes(step)
            users = {found[reader] for reader in readers.get(place, ())}
            found[index] = users.pop() if modes[index] is Mode.AGAIN and len(users) == 1 and place not in outputs else -1
    return found


def _parts(program: Program, schedule: Schedule, modes: dict[int, Mode]) -> tuple[Part, ...]:
    """Each segment in one part, what stands between its steps before it; where that depends on the segment, it is cut there."""
    segments = _segments(program, schedule, modes)
    if all(segment < 0 for segment in segments):
        return (Part(steps=tuple(range(len(segments))), again=False),)
    found: list[tuple[int, list[int]]] = [(-1, [])]
    inside: set[Place] = set()
    for index, step in enumerate(program.steps):
        segment, current = segments[index], found[-1][0]
        if segment == current:
            found[-1][1].append(index)
        elif segment < 0 and not any(place in inside for place in reads(step)):
            found[-2][1].append(index)
            continue
        else:
            if segment >= 0 and current >= 0:
                found.append((-1, []))
            found.append((segment, [index]))
            inside = set()
        if segment >= 0:
            inside.update(makes(step))
    gradients = program.assignment.gradients
    return tuple(
        Part(steps=tuple(steps), again=segment >= 0 and any(n in gradients for i in steps for n, _ in makes(program.steps[i])))
        for segment, steps in found
        if steps
    )


def _regathered(program: Program, modes: dict[int, Mode], parts: tuple[Part, ...]) -> dict[int, tuple[int, ...]]:
    """Where values that were gathered are gathered again: at the last of their readers whose backward pass reads them."""
    inside = {index for part in parts if part.again for index in part.steps}
    again = {makes(program.steps[i])[0]: i for i, mode in modes.items() if mode is Mode.AGAIN and i not in inside}
    if not again:
        return {}
    views: dict[Place, tuple[Place, bool]] = {}  # a view → what it is a view of, and whether in its order
    found: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    gradients = program.assignment.gradients
    for index, step in enumerate(program.steps):
        if not isinstance(step, Compute) or index in inside or step.operator.kind not in RULES:
            continue
        call, places = Call.of(program.graph, step.operator), reads(step)
        roots = [views.get(place, (place, True)) for place in places]
        if places and roots[0][0] in again and shares_memory(call, contiguous=roots[0][1]):
            same = call.inputs[0].shape == call.outputs[0].shape or len(call.inputs[0].shape) != len(call.outputs[0].shape)
            views.update((place, (roots[0][0], roots[0][1] and same)) for place in makes(step))
        if any(place[0] in gradients for place in makes(step)):
            for position in keeps(call, tuple(name in gradients for name in step.operator.inputs)).inputs:
                if roots[position][0] in again:
                    last[again[roots[position][0]]] = index
    for gather, reader in last.items():
        found.setdefault(reader, []).append(gather)
    return {reader: tuple(gathers) for reader, gathers in found.items()}


class _Lists:
    """The collectives of each step of a program, looked up once."""

    def __init__(self, plan: Scheduled) -> None:
        self.plan = plan
        program = plan.program
        mesh = program.assignment.mesh.shape
        self.steps = [_collectives(program, step, mesh) for step in program.steps]
        self.from_storage = {
            makes(step)[0]: index for index, step in enumerate(program.steps) if index in plan.modes and isinstance(step, Redistribute)
        }

    def forward(self, *, first: bool) -> Iterator[Collective]:
        """The forward pass of one micro-batch."""
        for part in self.plan.parts:
            for index in part.steps:
                if first or self.plan.modes.get(index, Mode.AGAIN) is Mode.AGAIN:
                    yield from self.steps[index][0]

    def backward(self, *, last: bool) -> Iterator[Collective]:
        """The backward pass of one micro-batch."""
        for part in reversed(self.plan.parts):
            if part.again:
                for index in part.steps:
                    yield from self.again(index)
            for index in reversed(part.steps):
                for gather in self.plan.regathered.get(index, ()):
                    yield from self.path(gather)
                if last or self.plan.modes.get(index, Mode.AGAIN) is not Mode.ONCE:
                    yield from self.steps[index][1]

    def again(self, index: int) -> list[Collective]:
        """The collectives of a step's second forward pass."""
        return [_back(c) for c in self.steps[index][0]]

    def path(self, gather: int) -> list[Collective]:
        """Those that make a gathered value again from what is stored."""
        step = self.plan.program.steps[gather]
        assert isinstance(step, Redistribute)
        before = self.from_storage.get((step.tensor, step.chain[0]))
        return [*(self.path(before) if before is not None else ()), *self.again(gather)]


def _back(c: Collective) -> Collective:
    return Collective(phase="backward", kind=c.kind, axis=c.axis, nbytes=c.nbytes, tensor=c.tensor)


def _collectives(program: Program, step: Step, mesh: tuple[int, ...]) -> tuple[list[Collective], list[Collective]]:
    """Those of a step forward, and those of its backward pass, each in the order of issue."""
    if isinstance(step, Redistribute):
        ahead, back = chain_collectives(program.graph, step, mesh)
        return ahead, back[::-1]
    if all(option.communication is None for option in step.decision.options):
        return [], []
    inside = operator_collectives(program.graph, step, mesh, program.assignment.gradients)
    return [c for c in inside if c.phase == "forward"], [c for c in inside if c.phase == "backward"]
