"""What every operator of a program takes: seconds of a micro-batch and of a step, and bytes, in the order of the model.

A redistribution counts to the operator behind it, a parameter to the first operator that reads it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.memory.liveness import Recompute, live_bytes
from autopar.costmodel.memory.saved_values import facts_of
from autopar.costmodel.step.casts import cast_seconds
from autopar.costmodel.step.estimate import step_seconds
from autopar.costmodel.step.host import state_bytes, streamed_update
from autopar.costmodel.step.pass_player import Seconds
from autopar.costmodel.step.pricing import MeshPrices, storage_bytes, update_seconds

from ..ir import Role, Tensor
from ..order.value_flow import only_casts, with_casts
from ..sharding.analysis import Analysis
from ..sharding.layout import Kind, Layout
from ..sharding.mesh import Axes
from ..sharding.program import Compute, Program, Redistribute, chain_collectives, inputs_read, operator_collectives
from ..sharding.redistribution import changed_axes, local_bytes
from ..sharding.rules import without_parameters
from ..sharding.schedule import Schedule
from .parameter_handling import Handled, handling, home_seconds, way_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCosts:
    """Arrays [operators]. Seconds of a micro-batch: `forward`, `backward`, and of the latter `weight`. `once`: seconds of a step's
    reductions and gathers, these also in `gather`; `update`: of the optimizer, of which `streamed` for the way to host memory and back;
    `moved`: of collectives of a micro-batch, within forward and backward. `travel`: bytes of the parameters that are gathered or whose
    gradients are reduced.

    `stored`: bytes of parameters, gradients and optimizer state; `host`: of the state that is in host memory instead; `saved`: of what a
    micro-batch keeps; `excess`: of what is alive beside while the operator is at work; `flat`: of flat copies of gradients, from the last
    backward pass to the end of the step. `handed`: array [operators + 1], bytes of a device's values made before an operator and read from
    it on.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    moved: Floats
    once: Floats
    gather: Floats
    travel: Floats
    update: Floats
    streamed: Floats
    stored: Floats
    host: Floats
    saved: Floats
    excess: Floats
    flat: Floats
    handed: Floats


def operator_costs(program: Program, analysis: Analysis, prices: MeshPrices, *, optimizer: str, schedule: Schedule) -> OperatorCosts:
    """The figures of a program of one micro-batch under a schedule."""
    return _OperatorCosts(program, analysis, prices, optimizer, schedule).run()


class _OperatorCosts:
    def __init__(self, program: Program, analysis: Analysis, prices: MeshPrices, optimizer: str, schedule: Schedule) -> None:
        self.program, self.analysis, self.prices = with_casts(program, schedule.types), analysis, prices
        self.optimizer, self.schedule, self.types = optimizer, schedule, schedule.types
        self.graph, self.mesh = program.graph, prices.mesh.shape
        self.places = {op.name: index for index, op in enumerate(self.graph.operators)}
        self.again = {name for segment in schedule.recompute for name in segment}
        names = (one.name for one in fields(OperatorCosts) if one.name != "handed")
        self.of: dict[str, Floats] = {name: np.zeros(len(self.graph.operators)) for name in names}
        self.first = {name: readers[0][0] for name, readers in analysis.readers.items() if readers[0][0] >= 0}
        self.known: dict[object, Seconds] = {}
        self.seconds: dict[tuple[str, Axes, int], float] = {}
        self.handled: dict[object, Handled] = {}
        self.brought: set[str] = set()

    def run(self) -> OperatorCosts:
        waiting: list[Redistribute] = []
        for step in self.program.steps:
            if isinstance(step, Redistribute):
                waiting.append(step)
                continue
            index = self.places[step.operator.name]
            for move in waiting:
                self._move(move, index)
            waiting = []
            self._compute(step, index)
        for move in waiting:
            self._move(move, len(self.graph.operators) - 1)
        self._parameters()
        self._memory()
        return OperatorCosts(**self.of, handed=self._handed())

    def _collective(self, kind: str, axes: Axes, nbytes: int) -> float:
        key = (kind, axes, nbytes)
        if key not in self.seconds:
            self.seconds[key] = self.prices.seconds(*key)
        return self.seconds[key]

    def _move(self, step: Redistribute, index: int) -> None:
        """Seconds of a redistribution: of a parameter once a step, or for every pass; of a value in every pass."""
        forward, backward = chain_collectives(self.graph, step, self.mesh, self.types)
        tensor = self.graph.tensors[step.tensor]
        stored, whole = tensor.role is Role.PARAMETER, tensor.bytes
        seconds = functools.partial(self.prices.unit_seconds, whole=whole) if stored else self._collective
        ahead, back = (sum(seconds(c.kind, c.axes, c.nbytes) for c in found) for found in (forward, backward))
        if stored:
            self.of["travel"][index] += local_bytes(step.chain[-1], whole, self.mesh)
            size = local_bytes(step.chain[0], self.types.reduced_bytes(tensor), self.mesh)
            summed = self._summed(step)
            self.of["flat"][index] += size if summed else 0.0
            for axes in summed:
                self.of["once"][index] += self.prices.unit_seconds("all_reduce", axes, size, whole)
            self._handle(step.tensor, step.chain[0], step.chain[-1], index)
            if self.schedule.gathered == "kept":
                self.of["once"][index] += ahead
                self.of["gather"][index] += ahead
                if self.schedule.accumulated == "whole":
                    self.of["once"][index] += back
                    back = 0.0
                ahead = 0.0
        again = self.graph.operators[index].name in self.again or (stored and self.schedule.gathered == "again")
        self.of["forward"][index] += ahead
        self.of["backward"][index] += back + (ahead if again else 0.0)
        self.of["moved"][index] += ahead + back + (ahead if again else 0.0)

    def _handle(self, name: str, stored: Layout, used: Layout, index: int) -> None:
        """Seconds of what is done with a parameter on its way beside communication; its gradient is cast and added once."""
        further = name in self.brought
        self.brought.add(name)
        tensor, trained = self.graph.tensors[name], name in self.program.assignment.gradients
        key = (stored, used, tensor.shape, tensor.dtype, self.types.reduced(tensor), trained, further)
        if key not in self.handled:
            found = handling(tensor, way_of(stored, used, self.mesh), self.prices, self.types, trained=trained)
            self.handled[key] = (found.further if further else found).under(self.schedule)
        handled = self.handled[key]
        self.of["update"][index] += handled.once
        self.of["forward"][index] += handled.forward
        self.of["backward"][index] += handled.backward

    def _summed(self, step: Redistribute) -> list[Axes]:
        """The axes of every sum of a parameter's gradient as it is stored."""
        return [changed_axes(before, after) for before, after in itertools.pairwise(step.chain[: step.bucketed + 1])]

    def _compute(self, step: Compute, index: int) -> None:
        name = step.operator.name
        if name in self.analysis.cold:
            return
        key = (id(self.analysis.offers[name]), tuple(option.name for option in step.decision.options))
        if key not in self.known:
            self.known[key] = step_seconds(step, self.analysis, self.prices)
        found = self.known[key]
        inside = [0.0, 0.0]
        if any(option.communication is not None for option in step.decision.options):
            for c in operator_collectives(self.graph, step, self.mesh, self.program.assignment.gradients):
                inside[c.phase == "backward"] += self._collective(c.kind, c.axes, c.nbytes)
        repeated = found.forward + inside[0] if name in self.again else 0.0
        self.of["forward"][index] += found.forward + inside[0]
        self.of["backward"][index] += found.backward + inside[1] + repeated
        self.of["weight"][index] += found.weight
        self.of["moved"][index] += sum(inside)

    def _parameters(self) -> None:
        for tensor in self.graph.parameters:
            index = self.first.get(tensor.name, 0)
            size = local_bytes(self.program.assignment.storage[tensor.name], tensor.bytes, self.mesh)
            shards = np.array([max(tensor.bytes // max(size, 1), 1)])
            stored = storage_bytes(tensor, shards, self.optimizer, train=self.analysis.train, types=self.types)
            self.of["stored"][index] += float(stored[0])
            layout = self.program.assignment.storage[tensor.name]
            if tensor.name not in self.brought:
                self._handle(tensor.name, layout, layout, index)
            if self.analysis.train and tensor.trainable:
                seconds = float(update_seconds(tensor, shards, self.optimizer, self.prices.cluster, self.types)[0])
                home = float(home_seconds(tensor, shards, self.types, self.prices.cluster.device)[0])
                self.of["update"][index] += seconds + home
                self.of["once"][index] += float(cast_seconds(tensor, shards, self.prices.cluster, self.types)[0])
                if tensor.name in self.program.assignment.host:
                    self._in_host(tensor, shards, index, seconds)

    def _in_host(self, tensor: Tensor, shards: NDArray[np.int64], index: int, seconds: float) -> None:
        """The state of a parameter is in host memory, its update would take so many seconds else."""
        longer = float(streamed_update(tensor, shards, self.optimizer, self.prices.cluster, self.types)[0]) - seconds
        state = float(state_bytes(tensor, shards, self.optimizer, self.types)[0])
        for name, value in (("update", longer), ("streamed", longer), ("stored", -state), ("host", state)):
            self.of[name][index] += value

    def _memory(self) -> None:
        """One walk; copies of gathered parameters that stay from micro-batch to micro-batch count as stored."""
        facts = facts_of(self.analysis)
        recompute = Recompute(segments=self.schedule.recompute)
        live = live_bytes(
            self.program, facts, train=self.analysis.train, recompute=recompute, accumulating=True, units=True, types=self.types
        )
        for name, size in live.saved_of.items():
            self.of["saved"][self.places.get(name, 0)] += size
        saved = np.cumsum(self.of["saved"])
        for moment, name in enumerate(live.moments):
            if name in self.places:
                index = self.places[name]
                alive = live.kept[moment] + live.gradients[moment] + live.passing[moment]
                self.of["excess"][index] = max(float(self.of["excess"][index]), alive - float(saved[index]))
        self._inputs()
        self._copies()

    def _inputs(self) -> None:
        """The parts of inputs that a stage reads, of every micro-batch in flight; they are none of what the walk found alive."""
        here = set(inputs_read(self.program))
        for index, op in enumerate(self.graph.operators):
            if op.name not in self.analysis.cold:
                for name, layout in zip(op.inputs, self.program.assignment.decisions[op.name].inputs, strict=True):
                    if (name, layout) in here:
                        here.remove((name, layout))
                        self.of["saved"][index] += local_bytes(layout, self.graph.tensors[name].bytes, self.mesh)

    def _copies(self) -> None:
        """Copies of parameters that are gathered once a step, with their gradients where these are added up whole, or only cast."""
        whole = self.schedule.accumulated == "whole" and self.schedule.micro_batches > 1
        for step in self.program.steps:
            if not isinstance(step, Redistribute) or self.graph.tensors[step.tensor].role is not Role.PARAMETER:
                continue
            tensor = self.graph.tensors[step.tensor]
            before, after = (local_bytes(layout, tensor.bytes, self.mesh) for layout in (step.chain[0], step.chain[-1]))
            if only_casts(step):
                self.of["stored"][self.first[step.tensor]] += after
            elif after > before and self.schedule.gathered == "kept":
                gradient = local_bytes(step.chain[-1], self.types.reduced_bytes(tensor), self.mesh) if whole else 0
                self.of["stored"][self.first[step.tensor]] += after + gradient

    def _handed(self) -> Floats:
        """Bytes of the shards that a stage which begins at an operator receives; what no parameter leads to each stage makes itself."""
        own = {op.name for op in without_parameters(self.graph)}
        last: dict[str, int] = {}
        for index, op in enumerate(self.graph.operators):
            if op.name not in self.analysis.cold:
                for name in op.inputs:
                    last[name] = index
        change = np.zeros(len(self.graph.operators) + 2)
        for index, op in enumerate(self.graph.operators):
            if op.name in own:
                continue
            decision = self.program.assignment.decisions[op.name]
            for name, layout in zip(op.outputs, decision.outputs, strict=True):
                if name in last:
                    shards = np.prod([self.mesh[a] for a, p in enumerate(layout) if p.kind is Kind.SPLIT], initial=1.0)
                    size = self.graph.tensors[name].bytes / shards
                    change[index + 1] += size
                    change[last[name] + 1] -= size
        return np.maximum(np.cumsum(change)[: len(self.graph.operators) + 1], 0.0)
