"""The seconds and bytes of every operator of a program, in the order of the model.

A redistribution counts to the operator behind it, a parameter to the first operator that reads it.
So the costs of any stretch of operators are sums, of which stages are made.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.step.casts import cast_seconds
from autopar.costmodel.step.covered import SLOWDOWN, Covers, Seconds
from autopar.costmodel.step.estimate import step_seconds
from autopar.costmodel.step.host_offload import state_bytes, streamed_update
from autopar.costmodel.step.issued_calls import Host
from autopar.costmodel.step.matrix_updates import Share, share_of
from autopar.costmodel.step.merged_pair import hidden_by_layer
from autopar.costmodel.step.mesh_prices import (
    MeshPrices,
    optimizer_of,
    storage_bytes,
    update_seconds,
)
from autopar.ir import Role, Tensor
from autopar.planning.tables.parameters.handling import Handled, handling, home_seconds, way_of
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import (
    Compute,
    Program,
    Redistribute,
    chain_collectives,
    operator_collectives,
    speaks,
)
from autopar.sharding.redistribution import changed_axes, local_bytes
from autopar.sharding.schedule import Schedule

from .costed_program import CostedProgram
from .operator_memory import add_copies, handed_bytes, saved_and_excess

Floats = NDArray[np.float64]


AHEAD = 32
"""Operators by which the host runs ahead, about a layer of a transformer."""
NUMBERS = ("visit", "call")
"""The figures that are no arrays."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorCosts:
    """Arrays [operators] of seconds and bytes.

    Seconds of a micro-batch:

    - `forward`, `backward`: of both passes.
    - `weight`: the part of `backward` for gradients of weights.
    - `hidden`: by which both passes are shorter where they are merged.
    - `moved`: the part of both passes for collectives.

    Seconds of a step:

    - `once`: of gathers and reductions of parameters; `gather`: the gathers among them.
    - `update`: of the optimizer; `streamed`: the way to host memory and back in it; `products`: of
      the owners of whole matrices in it, on the mean rank; `largest`: of one matrix.

    Bytes:

    - `travel`: of parameters that are gathered, or whose gradients are reduced.
    - `stored`: of parameters, gradients and optimizer state.
    - `host`: of the optimizer state that is in host memory instead.
    - `saved`: what a micro-batch keeps for its backward pass.
    - `excess`: what is alive besides while the operator is at work.
    - `flat`: flat copies of gradients, from the last backward pass to the end of the step.
    - `handed`: array [operators + 1], a device's values made before an operator and read from it
      on.

    Seconds of the host, numbers: `visit` for each pass of a chunk, `call` for a step.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    hidden: Floats
    moved: Floats
    once: Floats
    gather: Floats
    travel: Floats
    update: Floats
    streamed: Floats
    products: Floats
    largest: Floats
    stored: Floats
    host: Floats
    saved: Floats
    excess: Floats
    flat: Floats
    handed: Floats
    visit: float = 0.0
    call: float = 0.0

    def uneven(self, start: int, stop: int) -> float:
        """Return the seconds by which a stage's largest matrix exceeds the work of its mean rank.

        The update of the operators `start` to `stop` - 1 takes as much longer.
        """
        largest = float(self.largest[start:stop].max(initial=0.0))
        return max(largest - float(self.products[start:stop].sum()), 0.0) if largest else 0.0


def operator_costs(
    program: Program,
    analysis: Analysis,
    prices: MeshPrices,
    *,
    optimizer: str,
    schedule: Schedule,
    merges: bool = False,
) -> OperatorCosts:
    """Return the costs of the operators of a program of one micro-batch under a schedule.

    `merges`: whether passes may be merged; otherwise nothing is `hidden`.
    """
    costed = CostedProgram.of(program, analysis, prices, optimizer, schedule)
    saved, excess = saved_and_excess(costed)
    count = len(program.graph.operators)
    costs = OperatorCosts(
        forward=np.zeros(count),
        backward=np.zeros(count),
        weight=np.zeros(count),
        hidden=np.zeros(count),
        moved=np.zeros(count),
        once=np.zeros(count),
        gather=np.zeros(count),
        travel=np.zeros(count),
        update=np.zeros(count),
        streamed=np.zeros(count),
        products=np.zeros(count),
        largest=np.zeros(count),
        stored=np.zeros(count),
        host=np.zeros(count),
        saved=saved,
        excess=excess,
        flat=np.zeros(count),
        handed=handed_bytes(costed),
        visit=prices.cluster.host_seconds("pass"),
        call=prices.cluster.host_seconds("step"),
    )
    _Adder(costed, costs).add_all()
    if merges:
        for name, seconds in hidden_by_layer(program, analysis, prices, schedule).items():
            costs.hidden[costed.places[name]] = seconds
    add_copies(costed, costs.stored)
    return costs


class _Adder:
    """Adds the seconds of a program's steps, and the bytes of its parameters, to `costs`."""

    def __init__(self, costed: CostedProgram, costs: OperatorCosts) -> None:
        self.costed = costed
        self.costs = costs
        self.program = costed.program
        self.analysis = costed.analysis
        self.prices = costed.prices
        self.schedule = costed.schedule
        self.types = costed.types
        self.graph = costed.graph
        self.mesh = costed.mesh
        self.recomputed = {name for segment in costed.schedule.recompute for name in segment}
        self.host = Host(self.graph, self.mesh, self.prices.cluster)
        self.issued = np.zeros((2, len(self.graph.operators)))
        self.handled_parameters: set[str] = set()
        self.covers = Covers.of(
            self.program, self.prices.cluster.framework.habits, self._seconds_of
        )
        # Equal parameters are priced once.
        self._handlings: dict[object, Handled] = {}
        self._shares: dict[tuple[tuple[int, ...], Layout], Share] = {}

    def add_all(self) -> None:
        """Add all steps of the program, then what its parameters take."""
        waiting: list[Redistribute] = []
        for step in self.program.steps:
            if isinstance(step, Redistribute):
                waiting.append(step)
                continue
            index = self.costed.places[step.operator.name]
            for redistribution in waiting:
                self._redistribute(redistribution, index)
            waiting = []
            self._compute(step, index)
        # No operator is behind the redistributions of the model's outputs: they count to the last.
        for redistribution in waiting:
            self._redistribute(redistribution, len(self.graph.operators) - 1)
        for tensor in self.graph.parameters:
            self._store(tensor)
        self._wait_for_host()

    # --- computation ---

    def _seconds_of(self, step: Compute) -> Seconds:
        """The seconds of an operator; none where it depends on no input."""
        if step.operator.name in self.analysis.cold:
            return Seconds(0.0, 0.0)
        return step_seconds(step, self.analysis, self.prices)

    def _compute(self, step: Compute, index: int) -> None:
        """Add the seconds of an operator, with the collectives inside it."""
        name = step.operator.name
        if name in self.analysis.cold:
            return
        seconds = self._seconds_of(step)
        ahead = 0.0
        back = 0.0
        if speaks(step):
            gradients = self.program.assignment.gradients
            for c in operator_collectives(self.graph, step, self.mesh, gradients):
                if c.phase == "backward":
                    back += self.prices.collective(c)
                else:
                    ahead += self.prices.collective(c)
        # The backward pass of a recomputed operator runs its forward pass again.
        repeated = name in self.recomputed
        issued = self.host.issues(step, seconds)
        self.issued[:, index] = issued[0], issued[1] + (issued[0] if repeated else 0.0)
        self.costs.forward[index] += seconds.forward
        self.costs.backward[index] += seconds.backward + (seconds.forward if repeated else 0.0)
        self.costs.weight[index] += seconds.weight
        self._add_passes(index, ahead, back, repeated=repeated)

    def _wait_for_host(self) -> None:
        """Lengthen the passes that the host issues for longer than the device computes."""
        if not self.issued.any():
            return
        blocks = np.arange(0, self.issued.shape[1], AHEAD)
        for seconds, issued in zip(
            (self.costs.forward, self.costs.backward), self.issued, strict=True
        ):
            if self.host.blocking:
                seconds += issued
                continue
            waits = np.add.reduceat(issued, blocks) - np.add.reduceat(seconds, blocks)
            seconds[blocks] += np.maximum(waits, 0.0)

    # --- redistributions ---

    def _redistribute(self, step: Redistribute, index: int) -> None:
        """Add the seconds of a redistribution.

        A value is redistributed in every pass, a parameter once a step or for every pass.
        """
        tensor = self.graph.tensors[step.tensor]
        if tensor.role is Role.PARAMETER:
            self._bring(tensor, step, index)
            return
        forward, backward = chain_collectives(self.graph, step, self.mesh, self.types)
        ahead = sum(map(self.prices.collective, forward))
        back = sum(map(self.prices.collective, backward))
        repeated = self.graph.operators[index].name in self.recomputed
        if self.covers is not None and (forward or backward):
            ranks = degree_of((*forward, *backward)[0].axes, self.mesh)
            moved = self.covers.moved(step, ahead, back, ranks)
            slowdown = SLOWDOWN[self.prices.cluster.backend]
            ahead = moved.ahead.seconds(slowdown)
            back = moved.back.seconds(slowdown) + moved.repeated.seconds(slowdown)
        self._add_passes(index, ahead, back, repeated=repeated)

    def _bring(self, tensor: Tensor, step: Redistribute, index: int) -> None:
        """Add the seconds of bringing a parameter to its readers, and its gradient back."""
        costs = self.costs
        forward, backward = chain_collectives(self.graph, step, self.mesh, self.types)
        seconds = functools.partial(self.prices.unit_seconds, whole=tensor.bytes)
        ahead = sum(seconds(c.kind, c.axes, c.nbytes) for c in forward)
        back = sum(seconds(c.kind, c.axes, c.nbytes) for c in backward)
        stored = step.chain[0]
        used = step.chain[-1]
        costs.travel[index] += local_bytes(used, tensor.bytes, self.mesh)
        # The gradient of a parameter that is stored whole is summed as it is stored.
        size = local_bytes(stored, self.types.reduced_bytes(tensor), self.mesh)
        summed = [
            changed_axes(before, after)
            for before, after in itertools.pairwise(step.chain[: step.bucketed + 1])
        ]
        costs.flat[index] += size if summed else 0.0
        for axes in summed:
            costs.once[index] += seconds("all_reduce", axes, size)
        self._handle(tensor, stored, used, index)
        if self.schedule.gathered == "per_step":
            costs.once[index] += ahead
            costs.gather[index] += ahead
            # Whole gradients are reduced once a step, shards after every micro-batch.
            if self.schedule.accumulated == "whole":
                costs.once[index] += back
                back = 0.0
            ahead = 0.0
        repeated = (
            self.graph.operators[index].name in self.recomputed
            or self.schedule.gathered == "per_pass"
        )
        self._add_passes(index, ahead, back, repeated=repeated)

    def _add_passes(self, index: int, ahead: float, back: float, *, repeated: bool) -> None:
        """Add seconds of both passes; `repeated`: the backward pass does the forward part again."""
        repeated_seconds = ahead if repeated else 0.0
        self.costs.forward[index] += ahead
        self.costs.backward[index] += back + repeated_seconds
        self.costs.moved[index] += ahead + back + repeated_seconds

    # --- parameters ---

    def _handle(self, tensor: Tensor, stored: Layout, used: Layout, index: int) -> None:
        """Add the seconds of a parameter's copies, casts and additions on one way to a reader.

        Its gradient is cast and added once, however many ways there are.
        """
        further = tensor.name in self.handled_parameters
        self.handled_parameters.add(tensor.name)
        trained = tensor.name in self.program.assignment.gradients
        reduced = self.types.reduced(tensor)
        key = (stored, used, tensor.shape, tensor.bytes, reduced, trained, further)
        if key not in self._handlings:
            way = way_of(stored, used, self.mesh)
            work = handling(tensor, way, self.prices, self.types, trained=trained)
            if further:
                work = work.further
            self._handlings[key] = work.under(self.schedule)
        handled = self._handlings[key]
        self.costs.update[index] += handled.once
        self.costs.forward[index] += handled.forward
        self.costs.backward[index] += handled.backward

    def _store(self, tensor: Tensor) -> None:
        """Add the bytes of a stored parameter, and the seconds of its update."""
        costs = self.costs
        matrices = self.program.assignment.matrices
        optimizer = optimizer_of(tensor, self.costed.optimizer, matrices)
        cluster = self.prices.cluster
        train = self.analysis.train
        # A parameter without a reader is stored all the same: it counts to the first operator.
        index = self.costed.first.get(tensor.name, 0)
        layout = self.program.assignment.storage[tensor.name]
        size = local_bytes(layout, tensor.own_bytes, self.mesh)
        shards = np.array([max(tensor.own_bytes // max(size, 1), 1)])
        stored = storage_bytes(
            tensor,
            shards,
            optimizer,
            train=train,
            types=self.types,
            moment=cluster.framework.moment,
        )
        costs.stored[index] += float(stored[0])
        if tensor.name not in self.handled_parameters:
            # It is used as it is stored, so no redistribution brought it.
            self._handle(tensor, layout, layout, index)
        if not train or not tensor.trainable:
            return
        seconds = float(update_seconds(tensor, shards, optimizer, cluster, self.types)[0])
        home = float(home_seconds(tensor, shards, self.types, cluster.device)[0])
        if tensor.name in matrices:
            share = self._share(tensor, layout)
            seconds += share.seconds
            costs.products[index] += share.products
            costs.largest[index] = max(costs.largest[index], share.largest)
        costs.update[index] += seconds + home
        costs.backward[index] += cluster.host_seconds("gradient")
        costs.once[index] += float(cast_seconds(tensor, shards, cluster, self.types)[0])
        if tensor.name in self.program.assignment.host:
            streamed = streamed_update(tensor, shards, optimizer, cluster, self.types)
            longer = float(streamed[0]) - seconds
            state = float(state_bytes(tensor, shards, optimizer, self.types)[0])
            costs.update[index] += longer
            costs.streamed[index] += longer
            costs.stored[index] -= state
            costs.host[index] += state

    def _share(self, tensor: Tensor, layout: Layout) -> Share:
        """Return a device's share of a whole matrix's update."""
        key = (tensor.shape, layout)
        if key not in self._shares:
            self._shares[key] = share_of(tensor, layout, self.prices)
        return self._shares[key]
