"""A stage of this rank: one chunk of the model, forward and backward, micro-batch by micro-batch.

Values between segments are plain: a segment takes them as leaves of an autograd graph of its own,
and its backward pass leaves their gradients for the segments before it. So a step runs in the order
of its actions, not in autograd's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.order.scheduled import Scheduled
from autopar.runtime.lowering import (
    Arrival,
    Exchange,
    LocalProgram,
    LocalSegment,
    Time,
    lower_preamble,
    lower_scheduled,
    same_operators,
)
from autopar.runtime.lowering.delayed_weight_gradients import Postponed, of_segment
from autopar.runtime.lowering.program import Place
from autopar.runtime.parameters.gradients import Gradients, in_own_memory
from autopar.runtime.parameters.units import ParameterUnits, Stored
from autopar.runtime.random_numbers.draw_state import Draws, drawing
from autopar.runtime.random_numbers.generator_states import GeneratorStates
from autopar.runtime.ranks.cuts import Cut, join, shard_of
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.layout import Kind, Placement
from autopar.sharding.time_split import TimeSplit


@dataclass(slots=True)
class _Tape:
    """The data that a segment's forward pass leaves for its backward pass."""

    values: list[Tensor]
    parameters: list[Tensor]
    outputs: list[Tensor]
    sources: list[Tensor]
    state: Tensor | None

    def tensors(self) -> list[Tensor]:
        """All tensors that this holds."""
        held = (*self.values, *self.parameters, *self.outputs, *self.sources)
        return [value for value in held if isinstance(value, Tensor)]


@dataclass(slots=True, kw_only=True)
class Passing:
    """One call of a stage: its micro-batches' values under way, their gradients, and its outputs.

    `known`: whole inputs, constants, and values made of them once. `keep`: whether a backward pass
    may follow.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The dealings of a chunk with other chunks.

    `arrivals`: values that come from them. `handed`: values that go to them. `late`: whether
    gradients of weights are made after those of inputs, so that the stage before need not wait.
    """

    arrivals: tuple[Arrival, ...] = ()
    handed: tuple[Arrival, ...] = ()
    late: bool = False


class Stage:
    """The lowered programs of a chunk, and the units of its parameters.

    Equal micro-batches share a program.
    """

    def __init__(
        self,
        plan: Scheduled,
        split: TimeSplit | None,
        groups: DeviceGroups,
        stored: Stored,
        device: torch.device,
        neighbours: Neighbours,
    ) -> None:
        self.plan = plan
        self.split = split
        self.groups = groups
        self.device = device
        self.late = neighbours.late
        self.exchange = Exchange(arrivals=neighbours.arrivals, handed=neighbours.handed)
        self.count = plan.schedule.micro_batches
        self.units = ParameterUnits(plan, groups, stored, device)
        self._way: Callable[[LocalProgram], LocalProgram] = lambda program: program
        self.first: LocalProgram = self._lower(0)
        self._programs: dict[int, LocalProgram] = {0: self.first}
        self.early_updates = self._early_updates() if split is not None else {}
        # Values that the preamble makes once a step: computed sources, and new values of constants
        # that no micro-batch makes.
        computed = {name for op in plan.program.graph.operators for name in op.outputs}
        sources = [name for name, _ in self.first.sources if name in computed]
        self.prepared = tuple(dict.fromkeys((*sources, *self.early_updates.values())))
        self.preamble, self.preamble_inputs = lower_preamble(
            plan, groups, self.prepared, device=device
        )
        self._last_read: dict[Place, int] = {}
        for number, segment in enumerate(self.first.segments):
            self._last_read.update(dict.fromkeys(segment.values, number))

    def _early_updates(self) -> dict[str, str]:
        """The new values of constants, by the constants' names, that no micro-batch makes."""
        program = self.plan.program
        later = dict(self.first.updates)
        return {
            name: fresh
            for name, fresh in program.graph.updates.items()
            if fresh in program.assignment.outputs and name not in later
        }

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
                self.plan,
                self.groups,
                device=self.device,
                time=self._time(index),
                exchange=self.exchange,
                late=self.late,
            )
        )

    def run_as(self, way: Callable[[LocalProgram], LocalProgram]) -> None:
        """Replace every program by `way(program)`, including those still to be lowered."""
        self._way = way
        before = self.first
        self.first = way(before)
        self._programs = {
            index: self.first if program is before else way(program)
            for index, program in self._programs.items()
        }

    def program(self, index: int) -> LocalProgram:
        """The program of a micro-batch."""
        if index not in self._programs:
            first = self._time(0)
            present = self._time(index)
            assert first is not None and present is not None
            # Operators with local forms may depend on the place in the batch; others do not.
            same = same_operators(self.plan, self.groups, first, present)
            self._programs[index] = self.first if same else self._lower(index)
        return self._programs[index]

    def begin(self, whole: Mapping[str, Tensor], *, keep: bool, draws: Draws) -> Passing:
        """A call on whole inputs and constants."""
        with torch.no_grad():
            prepared = self.preamble(*(whole[name] for name in self.preamble_inputs))
        known = {**whole, **dict(zip(self.prepared, prepared, strict=True))}
        passing = Passing(
            known=known,
            keep=keep,
            draws=draws,
            streams=GeneratorStates(self.device, active=draws.exact),
        )
        passing.updates.update((name, known[fresh]) for name, fresh in self.early_updates.items())
        return passing

    # --- forward ---

    def forward(self, passing: Passing, index: int, number: int) -> None:
        """Run a segment on a micro-batch."""
        program = self.program(index)
        segment = program.segments[number]
        values = passing.values.setdefault(index, {})
        # Whether a gradient flows, first for values, then for parameters.
        flows = [flow and passing.keep for flow in segment.differentiable]
        leaves = [_leaf(values[p], flow) for p, flow in zip(segment.values, flows, strict=False)]
        parameters = [
            _leaf(self.units.value(place), flow)
            for place, flow in zip(segment.parameters, flows[len(leaves) :], strict=False)
        ]
        sources = [
            self._cut(passing.known[name], placement, index) for name, placement in segment.sources
        ]
        state = passing.streams.enter(index)
        late = None
        if self.late and passing.keep:
            late = passing.late.setdefault((index, number), Postponed())
        records = passing.keep and not segment.recomputed
        with drawing(passing.draws), of_segment(late), torch.set_grad_enabled(records):
            outputs: tuple[Tensor, ...] = segment.module(*leaves, *parameters, *sources)
        passing.streams.leave(index)
        if passing.keep:
            # A recomputed segment saves neither gathered parameters nor its outputs.
            passing.tapes[index, number] = _Tape(
                values=leaves,
                parameters=parameters if records else [],
                outputs=list(outputs) if records else [],
                sources=sources,
                state=state,
            )
        for place in segment.values:
            # Behind its last reader a value lives on only where autograd has saved it.
            if self._last_read[place] == number:
                values.pop(place, None)
        # The last segment returns all outputs of the program, also those that it only reads.
        for place, value in zip(segment.outputs, outputs, strict=True):
            # The way of rows to their experts is no tensor.
            values[place] = value.detach() if isinstance(value, Tensor) else value
        if number == len(program.segments) - 1:
            self._finish(passing, index, program)

    def _finish(self, passing: Passing, index: int, program: LocalProgram) -> None:
        """Set the outputs of a micro-batch aside."""
        leaving = (
            *program.output_places,
            *(place for _, place in program.updates),
            *program.handed,
        )
        # Units are released after this: outputs must not lie in their memory.
        values = {
            place: self.units.surviving_release(passing.values[index][place]) for place in leaving
        }
        passing.outputs[index] = [values[place] for place in program.output_places]
        passing.updates.update((name, values[place]) for name, place in program.updates)
        passing.values[index] = {place: values[place] for place in program.handed}

    def _cut(self, value: Tensor, placement: Placement | None, index: int) -> Tensor:
        """A micro-batch's part of a value."""
        if placement is None or placement.kind is not Kind.SPLIT:
            return value
        cut = Cut(placement.dim, placement.parts, self.count, index)
        return shard_of(value, [cut]).contiguous()

    # --- backward ---

    def backward(
        self, passing: Passing, index: int, number: int, *, keep: bool = False, later: bool = False
    ) -> None:
        """The backward pass of a segment, from the gradients of its outputs.

        `keep`: it may run once more. `later`: weight gradients of matrix products are left for
        `weights`.
        """
        segment = self.program(index).segments[number]
        # Unless the graph is kept, the activations of the segment go with the end of this pass.
        tape = passing.tapes[index, number] if keep else passing.tapes.pop((index, number))
        arrived = passing.behind.setdefault(index, {})
        upstream = [arrived.pop(place, None) for place in segment.outputs]
        if all(gradient is None for gradient in upstream):
            return
        # Autograd reads the gathered weights that it has saved, so they must have come before.
        self.units.travel.wait(self.plan.segments[number].wanted)
        if segment.recomputed:
            with of_segment(passing.late.get((index, number))):
                self._recompute(passing, segment, tape)
        outputs = []
        starts = []
        for output, gradient in zip(tape.outputs, upstream, strict=True):
            if gradient is not None and output.requires_grad:
                outputs.append(output)
                starts.append(gradient)
        leaves = zip(
            (*segment.values, *segment.parameters), (*tape.values, *tape.parameters), strict=True
        )
        wanted = [
            (place, leaf)
            for place, leaf in leaves
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not outputs or not wanted:
            return
        if later:
            passing.late[index, number].later = True
        results: tuple[Tensor | None, ...] = torch.autograd.grad(
            outputs, [leaf for _, leaf in wanted], starts, allow_unused=True, retain_graph=keep
        )
        # The first micro-batch's gradients are those to which the others' are added.
        alone = [False] * len(results)
        if self.count > 1 and index == 0:
            alone = in_own_memory(results, [*starts, *tape.tensors()])
        gradients = deque(zip((place for place, _ in wanted), results, alone, strict=True))
        # Nothing else may hold a gradient, so that it is freed as soon as it is cast.
        del results
        self._hand_out(gradients, passing, index, set(segment.parameters))

    def _hand_out(
        self,
        gradients: deque[tuple[Place, Tensor | None, bool]],
        passing: Passing,
        index: int,
        parameters: Container[Place],
    ) -> None:
        """Take gradients away to where they belong, each with whether it is alone in its memory."""
        while gradients:
            place, result, alone = gradients.popleft()
            if result is not None and place in parameters:
                gradient = self.units.travelling(place[0], result)
                passing.gradients.add(place, gradient, own=alone or gradient is not result)
            elif result is not None:
                passing.returned(index, [place], [result])

    def weights(self, passing: Passing, index: int, number: int) -> None:
        """Make the weight gradients that a segment's backward pass has postponed."""
        for place, gradient in passing.late.pop((index, number)).make():
            passing.gradients.add(place, self.units.travelling(place[0], gradient))

    def _recompute(self, passing: Passing, segment: LocalSegment, tape: _Tape) -> None:
        """Run the forward pass once more, with autograd and the same random numbers."""
        flows = segment.differentiable[len(segment.values) :]
        tape.parameters = [
            _leaf(self.units.value(place), flow)
            for place, flow in zip(segment.parameters, flows, strict=False)
        ]
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
        if placement.kind is Kind.PARTIAL:
            return torch.stack(values).sum(0)
        return values[-1]


def _leaf(value: Any, flow: bool) -> Any:
    """A value without its history, the start of a new one where a gradient is wanted.

    The way of rows to their experts, which is no tensor, stays as it is.
    """
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    if flow and (leaf.is_floating_point() or leaf.is_complex()):
        leaf.requires_grad_()
    return leaf
