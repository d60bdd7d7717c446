"""A stage of this rank: the segments of one chunk of the model, forward and backward, micro-batch by micro-batch.

Values between segments are plain: a segment takes them as leaves of an autograd graph of its own, and its backward pass
leaves their gradients for the segments before it. So a step runs in the order of its actions, not in autograd's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.order.scheduled import Scheduled
from autopar.sharding.layout import Kind, Placement
from autopar.sharding.time_split import TimeSplit

from .collectives import Cut, DeviceGroups, join, shard_of
from .draws import Draws, drawing
from .generator_states import GeneratorStates
from .lowering import Arrival, LocalProgram, LocalSegment, Time, lower_preamble, lower_scheduled, same_operators
from .lowering.program import Place
from .postponing import Postponed, of_segment
from .units import Gradients, ParameterUnits, Stored


@dataclass(slots=True)
class _Tape:
    """The data that a segment's forward pass leaves for its backward pass."""

    values: list[Tensor]
    parameters: list[Tensor]
    outputs: list[Tensor]
    sources: list[Tensor]
    state: Tensor | None


@dataclass(slots=True, kw_only=True)
class Passing:
    """One call of a stage: the values of its micro-batches under way, their gradients, and its outputs.

    `known`: whole inputs, constants, and values made of them once. `keep`: whether a backward pass may follow.
    """

    known: Mapping[str, Tensor]
    keep: bool
    draws: Draws
    streams: GeneratorStates
    gradients: Gradients = field(default_factory=Gradients)
    values: dict[int, dict[Place, Tensor]] = field(default_factory=dict)
    behind: dict[int, dict[Place, Tensor]] = field(default_factory=dict)
    tapes: dict[tuple[int, int], _Tape] = field(default_factory=dict)
    late: dict[tuple[int, int], Postponed] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)

    def returned(self, index: int, places: Sequence[Place], gradients: Sequence[Tensor]) -> None:
        """Gradients of values that this stage has given, from where they were read."""
        behind = self.behind.setdefault(index, {})
        for place, gradient in zip(places, gradients, strict=True):
            before = behind.get(place)
            behind[place] = gradient if before is None else before + gradient


class Stage:
    """The lowered programs of a chunk, equal micro-batches sharing one, and the units of its parameters."""

    def __init__(
        self,
        plan: Scheduled,
        split: TimeSplit | None,
        groups: DeviceGroups,
        stored: Stored,
        device: torch.device,
        *,
        arrivals: Sequence[Arrival] = (),
        handed: Sequence[Arrival] = (),
        late: bool = False,
    ) -> None:
        self.plan, self.split, self.groups, self.device, self.late = plan, split, groups, device, late
        self.arrivals, self.handed = tuple(arrivals), tuple(handed)
        self.count = plan.schedule.micro_batches
        self.units = ParameterUnits(plan, groups, stored, device)
        self._way: Callable[[LocalProgram], LocalProgram] = lambda program: program
        self.first: LocalProgram = self._lower(0)
        self._programs: dict[int, LocalProgram] = {0: self.first}
        graph = plan.program.graph
        made = {name for op in graph.operators for name in op.outputs}
        # Values that the preamble makes once a step: computed sources, and new values of constants that no micro-batch
        # makes.
        given = {name for name, _ in self.first.updates}
        whole = [(name, fresh) for name, fresh in graph.updates.items() if fresh in plan.program.assignment.outputs and name not in given]
        self.early_updates = dict(whole if split is not None else ())
        prepared = (*(name for name, _ in self.first.sources if name in made), *self.early_updates.values())
        self.prepared = tuple(dict.fromkeys(prepared))
        self.preamble, self.preamble_inputs = lower_preamble(plan, groups, self.prepared, device=device)
        self._last_read = {place: number for number, segment in enumerate(self.first.segments) for place in segment.values}

    def on(self, stored: Stored) -> Stage:
        """The stage's programs on other parameters."""
        other = copy.copy(self)
        other.units = ParameterUnits(self.plan, self.groups, stored, self.device)
        return other

    # --- programs ---

    def _time(self, index: int) -> Time | None:
        return None if self.split is None else Time(split=self.split, count=self.count, index=index)

    def _lower(self, index: int) -> LocalProgram:
        return self._way(
            lower_scheduled(
                self.plan, self.groups, device=self.device, time=self._time(index), arrivals=self.arrivals, handed=self.handed,
                late=self.late,
            )
        )  # fmt: skip

    def run_as(self, way: Callable[[LocalProgram], LocalProgram]) -> None:
        """Replace every program by `way(program)`, including those still to be lowered."""
        self._way, before = way, self.first
        self.first = way(before)
        self._programs = {index: self.first if program is before else way(program) for index, program in self._programs.items()}

    def program(self, index: int) -> LocalProgram:
        """The program of a micro-batch."""
        if index not in self._programs:
            one, other = self._time(0), self._time(index)
            assert one is not None and other is not None
            same = same_operators(self.plan, self.groups, one, other)
            self._programs[index] = self.first if same else self._lower(index)
        return self._programs[index]

    def begin(self, whole: Mapping[str, Tensor], *, keep: bool, draws: Draws) -> Passing:
        """A call on whole inputs and constants."""
        with torch.no_grad():
            prepared = self.preamble(*(whole[name] for name in self.preamble_inputs))
        known = {**whole, **dict(zip(self.prepared, prepared, strict=True))}
        passing = Passing(known=known, keep=keep, draws=draws, streams=GeneratorStates(self.device, active=draws.exact))
        passing.updates.update((name, known[fresh]) for name, fresh in self.early_updates.items())
        return passing

    # --- forward ---

    def forward(self, passing: Passing, index: int, number: int) -> None:
        """Run a segment on a micro-batch."""
        program = self.program(index)
        segment = program.segments[number]
        values = passing.values.setdefault(index, {})
        flows = iter(segment.differentiable)
        leaves = [_leaf(values[place], flow and passing.keep) for place, flow in zip(segment.values, flows, strict=False)]
        parameters = [self._parameter(place, next(flows) and passing.keep) for place in segment.parameters]
        sources = [self._cut(passing.known[name], placement, index) for name, placement in segment.sources]
        state = passing.streams.enter(index)
        late = passing.late.setdefault((index, number), Postponed()) if self.late and passing.keep else None
        with drawing(passing.draws), of_segment(late), torch.set_grad_enabled(passing.keep and not segment.again):
            found: tuple[Tensor, ...] = segment.module(*leaves, *parameters, *sources)
        passing.streams.leave(index)
        if passing.keep:
            outputs = [] if segment.again else list(found)
            passing.tapes[index, number] = _Tape(leaves, [] if segment.again else parameters, outputs, sources, state)
        for place in segment.values:
            if self._last_read[place] == number:
                values.pop(place, None)
        # The last segment returns all outputs of the program, also those that it only reads.
        values.update((place, value.detach()) for place, value in zip(segment.outputs, found, strict=True))
        if number == len(program.segments) - 1:
            self._finish(passing, index, program)

    def _finish(self, passing: Passing, index: int, program: LocalProgram) -> None:
        """Set the outputs of a micro-batch aside."""
        leaving = (*program.output_places, *(place for _, place in program.updates), *program.handed)
        values = {place: self.units.lasting(passing.values[index][place]) for place in leaving}
        passing.outputs[index] = [values[place] for place in program.output_places]
        passing.updates.update((name, values[place]) for name, place in program.updates)
        passing.values[index] = {place: values[place] for place in program.handed}

    def _parameter(self, place: Place, flow: bool) -> Tensor:
        return _leaf(self.units.value(place), flow)

    def _cut(self, value: Tensor, placement: Placement | None, index: int) -> Tensor:
        """A micro-batch's part of a value."""
        if placement is None or placement.kind is not Kind.SPLIT:
            return value
        return shard_of(value, [Cut(placement.dim, placement.parts, self.count, index)]).contiguous()

    # --- backward ---

    def backward(self, passing: Passing, index: int, number: int, *, keep: bool = False, later: bool = False) -> None:
        """The backward pass of a segment, from the gradients of its outputs; with `keep` it may run once more.

        `later`: weight gradients of matrix products are left for `weights`.
        """
        segment = self.program(index).segments[number]
        tape = passing.tapes[index, number] if keep else passing.tapes.pop((index, number))
        arrived = passing.behind.setdefault(index, {})
        upstream = [arrived.pop(place, None) for place in segment.outputs]
        if all(gradient is None for gradient in upstream):
            return
        self.units.wait(self.plan.segments[number].wanted)
        if segment.again:
            with of_segment(passing.late.get((index, number))):
                self._again(passing, segment, tape)
        pairs = [(o, g) for o, g in zip(tape.outputs, upstream, strict=True) if g is not None and o.requires_grad]
        leaves = [*zip(segment.values, tape.values, strict=True), *zip(segment.parameters, tape.parameters, strict=True)]
        wanted = [(place, leaf) for place, leaf in leaves if leaf.requires_grad]
        if not pairs or not wanted:
            return
        if later:
            passing.late[index, number].later = True
        found = torch.autograd.grad(
            [o for o, _ in pairs], [leaf for _, leaf in wanted], [g for _, g in pairs], allow_unused=True, retain_graph=keep
        )
        own, made = set(segment.parameters), deque(zip((place for place, _ in wanted), found, strict=True))
        del found  # a gradient is freed as soon as it is cast
        while made:
            place, gradient = made.popleft()
            if gradient is not None and place in own:
                passing.gradients.add(place, self.units.travelling(place[0], gradient))
            elif gradient is not None:
                passing.returned(index, [place], [gradient])

    def weights(self, passing: Passing, index: int, number: int) -> None:
        """Make the weight gradients that a segment's backward pass has postponed."""
        for place, gradient in passing.late.pop((index, number)).make():
            passing.gradients.add(place, self.units.travelling(place[0], gradient))

    def _again(self, passing: Passing, segment: LocalSegment, tape: _Tape) -> None:
        """Run the forward pass once more, with autograd and the same random numbers."""
        flows = segment.differentiable[len(segment.values) :]
        tape.parameters = [self._parameter(place, flow) for place, flow in zip(segment.parameters, flows, strict=False)]
        with passing.streams.repeating(tape.state), drawing(passing.draws), torch.enable_grad():
            tape.outputs = list(segment.module(*tape.values, *tape.parameters, *tape.sources))

    # --- results of a call ---

    def joined(self, passing: Passing, place: int) -> Tensor:
        """One output of the whole batch from those of the micro-batches."""
        values = [passing.outputs[index][place] for index in sorted(passing.outputs)]
        if self.split is None:
            return values[0]
        placement = self.split.placements[self.first.outputs[place][0]]
        if placement.kind is Kind.SPLIT:
            return join(torch.stack(values), placement.dim, placement.parts)
        return torch.stack(values).sum(0) if placement.kind is Kind.PARTIAL else values[-1]


def _leaf(value: Tensor, flow: bool) -> Tensor:
    """A value without its history, the start of a new one where a gradient is wanted."""
    alone = value.detach()
    return alone.requires_grad_() if flow and (alone.is_floating_point() or alone.is_complex()) else alone
