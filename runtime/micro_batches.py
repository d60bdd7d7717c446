"""A step on micro-batches: forward and backward pass of one after the other, gradients added up and reduced once.

All of it runs when the loss is asked for; the loss's own backward pass hands the gradients, times the one that comes to it, on to the
parameters. So the memory is that of one micro-batch, and the loop of training is the usual one. Every micro-batch draws its random
numbers from the state at the start of the step and takes its part of them: the masks are those of one device that runs the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autopar.order.scheduled import Scheduled
from autopar.sharding.layout import Kind, Placement
from autopar.sharding.time_split import TimeSplit

from .again import gathering_again, random_state, set_random_state
from .collectives import Cut, DeviceGroups, join, shard_of
from .gradients import GradientBuckets, local_of
from .local_program import LocalProgram, Machinery, Time
from .lowering import local_operators, lower_preamble, lower_scheduled


class MicroBatches:
    """The lowered micro-batches of a rank, made when first run; equal ones are one."""

    def __init__(self, plan: Scheduled, split: TimeSplit, groups: DeviceGroups, device: torch.device) -> None:
        self.plan, self.split, self.groups, self.device = plan, split, groups, device
        self.count = plan.schedule.micro_batches
        self.machinery = Machinery()
        self.first: LocalProgram = self._lower(0)
        self.programs: dict[int, Callable[..., tuple[Tensor, ...]]] = {0: self.first.module.forward}
        self.operators = local_operators(plan, groups, self._time(0))
        made = {name for op in plan.program.graph.operators for name in op.outputs}
        graph = plan.program.graph
        self.updates = {name: graph.updates[name] for name in self.first.updates if name not in self.first.updated}
        self.prepared = tuple(dict.fromkeys((*(name for name, _ in self.first.sources if name in made), *self.updates.values())))
        self.preamble, self.given = lower_preamble(plan, groups, self.prepared, device=device)
        self.buckets: GradientBuckets | None = None

    def _time(self, index: int) -> Time:
        return Time(split=self.split, count=self.count, index=index)

    def _lower(self, index: int) -> LocalProgram:
        return lower_scheduled(self.plan, self.groups, device=self.device, time=self._time(index), machinery=self.machinery)

    def program(self, index: int) -> Callable[..., tuple[Tensor, ...]]:
        """The program of a micro-batch."""
        if index not in self.programs:
            same = local_operators(self.plan, self.groups, self._time(index)) == self.operators
            self.programs[index] = self.programs[0] if same else self._lower(index).module.forward
        return self.programs[index]

    # --- a step ---

    def run(
        self, parameters: Sequence[nn.Parameter], whole: Mapping[str, Tensor], wanted: Sequence[int]
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """The outputs `wanted` (their places) of the whole batch, and new values of constants, from the whole inputs and constants.

        Where autograd is on and there is a loss, the gradients of the parameters are made too; the loss leads to them.
        """
        with torch.no_grad():
            prepared = self.preamble(*(whole[name] for name in self.given))
        known = {**whole, **dict(zip(self.prepared, prepared, strict=True))}
        updates = {name: known[fresh] for name, fresh in self.updates.items()}
        loss = self.first.loss
        trained = [p for p in parameters if p.requires_grad]
        if loss is None or not trained or not torch.is_grad_enabled():
            with torch.no_grad():
                outputs, fresh = self.passes(parameters, known, wanted, backward=False)
            return outputs, updates | fresh
        step = _Inside(steps=self, parameters=parameters, trained=trained, known=known, wanted=(*wanted, loss))
        total: Tensor = _Step.apply(step, *trained)  # type: ignore[no-untyped-call]
        return step.outputs | {loss: total}, updates | step.fresh

    def passes(
        self, parameters: Sequence[nn.Parameter], known: Mapping[str, Tensor], wanted: Sequence[int], *, backward: bool
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """All micro-batches, each with its backward pass if so told."""
        progress, loss, count = self.machinery.progress, self.first.loss, len(self.first.outputs)
        progress.count = self.count
        state = random_state(self.device)
        found: list[dict[int, Tensor]] = []
        fresh: tuple[Tensor, ...] = ()
        try:
            for index in range(self.count):
                progress.index = index
                set_random_state(self.device, state)
                cut = [self._cut(known[name], placement, index) for name, placement in self.first.sources]
                with gathering_again() if backward and self.plan.schedule.gathered == "again" else nullcontext():
                    out = self.program(index)(*parameters, *cut)
                found.append({place: out[place].detach() for place in wanted})
                fresh = tuple(value.detach() for value in out[count:])
                ends = out[loss] if backward and loss is not None else None
                del out, cut
                if ends is not None:
                    self._backward(ends)
        finally:
            for kept in self.machinery.kept.values():
                kept.forget()
        outputs = {place: self._joined(place, [values[place] for values in found]) for place in wanted}
        return outputs, dict(zip(self.first.updated, fresh, strict=True))

    def _backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients up; those of the last one are summed over the ranks."""
        assert self.buckets is not None
        with nullcontext() if self.machinery.progress.last else self.buckets.no_sync():
            loss.backward()  # type: ignore[no-untyped-call]

    def _cut(self, value: Tensor, placement: Placement, index: int) -> Tensor:
        """A micro-batch's part of a value."""
        if placement.kind is not Kind.SPLIT:
            return value
        return shard_of(value, [Cut(placement.dim, placement.parts, self.count, index)]).contiguous()

    def _joined(self, place: int, values: list[Tensor]) -> Tensor:
        """One output of the whole batch from those of the micro-batches."""
        placement = self.split.placements[self.first.outputs[place][0]]
        if placement.kind is Kind.SPLIT:
            return join(torch.stack(values), placement.dim, placement.parts)
        return torch.stack(values).sum(0) if placement.kind is Kind.PARTIAL else values[-1]


@dataclass(kw_only=True)
class _Inside:
    """What a step is given, and what it gives beside the loss."""

    steps: MicroBatches
    parameters: Sequence[nn.Parameter]
    trained: Sequence[nn.Parameter]
    known: Mapping[str, Tensor]
    wanted: Sequence[int]
    outputs: dict[int, Tensor] = field(default_factory=dict)
    fresh: dict[str, Tensor] = field(default_factory=dict)


class _Step(torch.autograd.Function):
    """All micro-batches with their backward passes; its own backward pass only hands the gradients on."""

    @staticmethod
    def forward(ctx: Any, inside: _Inside, *trained: Tensor) -> Tensor:
        buckets, loss = inside.steps.buckets, inside.steps.first.loss
        assert buckets is not None and loss is not None
        before = [parameter.grad for parameter in inside.trained]
        ctx.buckets, ctx.summed = buckets, buckets.synchronize and not buckets.pending
        with torch.enable_grad(), buckets.apart(synchronize=ctx.summed):
            try:
                for parameter in inside.trained:
                    parameter.grad = None
                inside.outputs, inside.fresh = inside.steps.passes(inside.parameters, inside.known, inside.wanted, backward=True)
                ctx.gradients = [parameter.grad for parameter in inside.trained]
            finally:
                for parameter, gradient in zip(inside.trained, before, strict=True):
                    parameter.grad = gradient
        return inside.outputs[loss].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a step on micro-batches are handed on once; its backward pass cannot run a second time")
        for gradient in gradients:
            if gradient is not None:
                local_of(gradient).mul_(upstream[0].to(gradient.dtype))
        if ctx.summed:
            ctx.buckets.hand_on()
        return (None, *gradients)
