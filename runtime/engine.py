"""The engine of a planned module: this rank's stages, the order of a step, and the places of parameters and outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import PlanError
from autopar.ir import Role
from autopar.order.actions import Action
from autopar.order.execution import Chunk, Execution
from autopar.order.ranks import rank_order
from autopar.order.scheduled import scheduled
from autopar.order.schedules import schedule_named
from autopar.plan import Plan
from autopar.sharding.layout import Kind, Layout, R, local_shape
from autopar.sharding.program import Program

from .agreement import first_rank_says
from .collectives import DeviceGroups
from .current_action import aside
from .draws import Draws
from .local_forms.randomness import is_random
from .parameters import Storage, device_mesh
from .redistribution import gather_full
from .runner import Call, before_backward
from .stage import Stage
from .tied import TiedSums
from .transfers import edges_of
from .units import Gradients, Stored
from .world import World


class Engine:
    """Runs a plan on this rank."""

    def __init__(
        self, plan: Program | Execution, groups: DeviceGroups | World, device: torch.device, stored: Stored, *, exact: bool = False
    ) -> None:
        if isinstance(plan, Program):
            alone = scheduled(plan)
            plan = Execution(chunks=(Chunk(whole=alone, micro=alone, split=None),))
        self.execution, self.device, self.stored = plan, device, stored
        self.world = World.around(groups) if isinstance(groups, DeviceGroups) else groups
        self.graph, self.types = plan.graph, plan.schedule.types
        self.trains = plan.chunks[0].whole.trains
        self.constants = tuple(tensor.name for tensor in self.graph.tensors.values() if tensor.role is Role.CONSTANT)
        own = range(self.world.stage, len(plan.chunks), plan.stages) if self.world.stage is not None else ()
        self.stages = {number: self._stage(number, stored) for number in own}
        self.exact = exact
        self.random = is_random(self.graph)
        if exact and self.random and plan.stages > 1:
            raise PlanError("exact_random=True draws one device's random numbers in its order, which stages do not have; leave it out")
        self.loss_gradient = 1.0
        self.plan: Plan | None = None
        """The plan of the execution, if it comes from a plan's file."""

        self.edges = edges_of(plan, self.world, device)
        self.tied = TiedSums(plan, self.world, stored)

    def _stage(self, number: int, stored: Stored) -> Stage:
        chunk, edges = self.execution.chunks[number], self.execution.edges
        assert self.world.groups is not None
        arrivals = [(value.name, value.taken) for (_, target), values in edges.items() if target == number for value in values]
        late = self.execution.stages > 1 and schedule_named(self.execution.pipeline).splits
        handed = {(value.name, value.made): None for (source, _), values in edges.items() if source == number for value in values}
        return Stage(chunk.whole, chunk.split, self.world.groups, stored, self.device, arrivals=arrivals, handed=tuple(handed), late=late)

    def copied(self, stored: Stored) -> Engine:
        """A copy of the engine on other parameters."""
        other = copy.copy(self)
        other.stored = stored
        other.tied = TiedSums(self.execution, self.world, stored)
        other.stages = {number: stage.on(stored) for number, stage in self.stages.items()}
        return other

    # --- where things are ---

    @property
    def groups(self) -> DeviceGroups:
        """This rank's mesh."""
        assert self.world.groups is not None
        return self.world.groups

    def device_mesh(self) -> DeviceMesh:
        """This rank's mesh in torch's words."""
        return device_mesh(self.groups, self.device)

    @cached_property
    def outputs(self) -> tuple[tuple[str, Layout], ...]:
        """Every output with its layout, the loss last if it is no output; with stages all are whole on every rank."""
        if not self.world.staged:
            return self.stages[0].first.outputs
        given = {name for chunk in self.execution.chunks for name in chunk.whole.program.assignment.outputs}
        names = dict.fromkeys((*self.graph.outputs, *((self.graph.loss,) if self.graph.loss else ())))
        return tuple((name, ()) for name in names if name in given)

    @property
    def loss(self) -> int | None:
        """The index of the loss among the outputs."""
        names = [name for name, _ in self.outputs]
        return names.index(self.graph.loss) if self.graph.loss in names else None

    @cached_property
    def host(self) -> frozenset[str]:
        """Parameters whose optimizer state is in host memory."""
        return frozenset().union(*(chunk.whole.program.assignment.host for chunk in self.execution.chunks))

    @cached_property
    def _storages(self) -> tuple[Storage, ...]:
        """The storage of each chunk's parameters, seen from this rank."""
        found = []
        for number, chunk in enumerate(self.execution.chunks):
            stage = number % self.execution.stages
            own = [c.whole.program.assignment.storage.values() for c in self.execution.chunks[stage :: self.execution.stages]]
            plain = all(placement.kind is not Kind.SPLIT for layouts in own for layout in layouts for placement in layout)
            groups = self.world.groups if stage == self.world.stage else None
            found.append(Storage(chunk.mesh, groups, self.world.firsts[stage], self.device, plain=plain))
        return tuple(found)

    def storage_of(self, name: str) -> tuple[Storage, Layout]:
        """A parameter's storage and layout, on this rank's own chunk if one holds it, else on the first that does."""
        holders = [n for n, chunk in enumerate(self.execution.chunks) if name in chunk.whole.program.assignment.storage]
        own = next((number for number in holders if number in self.stages), holders[0])
        return self._storages[own], self.execution.chunks[own].whole.program.assignment.storage[name]

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a parameter."""
        return not self.world.staged or any(name in self.execution.chunks[n].whole.program.assignment.storage for n in self.stages)

    def makes(self, name: str) -> bool:
        """Whether this rank's value of a constant is current: no call changes it, or this rank's stages update it."""
        if name not in self.graph.updates or not self.world.staged:
            return True
        return any(name in stage.early_updates or name in dict(stage.first.updates) for stage in self.stages.values())

    def master(self, name: str) -> torch.dtype:
        """The type in which a parameter is stored and its gradient given."""
        found: torch.dtype = getattr(torch, self.types.stored(self.graph.tensors[name]))
        return found

    def replicated(self, value: Tensor) -> Tensor:
        """A value that all ranks of the stage have, as a DTensor on its mesh."""
        storage = self._storages[next(iter(self.stages))]
        return storage.described_as(value, (R,) * len(storage.mesh.axes), value.shape)

    def described(self, name: str, shard: Tensor) -> Tensor:
        """A gradient of this rank's shard as the parameter lies."""
        storage, layout = self.storage_of(name)
        return storage.described_as(shard, layout, torch.Size(self.graph.tensors[name].shape))

    def whole_parameter(self, name: str, shard: Tensor | None) -> Tensor:
        """The whole tensor on every rank from this rank's shard (None: it has none)."""
        if not self.world.staged:
            assert shard is not None
            return gather_full(shard, self.storage_of(name)[1], self.groups)
        holder = next(n for n, chunk in enumerate(self.execution.chunks) if name in chunk.whole.program.assignment.storage)
        stage = holder % self.execution.stages
        if stage == self.world.stage:
            assert shard is not None
            layout = self.execution.chunks[holder].whole.program.assignment.storage[name]
            whole = gather_full(shard, layout, self.groups).contiguous()
        else:
            whole = torch.empty(self.graph.tensors[name].shape, dtype=self.master(name), device=self.device)
        dist.broadcast(whole, src=self.world.firsts[stage])
        return whole

    # --- running ---

    @property
    def gives_gradients_at_once(self) -> bool:
        """Whether passes of micro-batches alternate, so that gradients are made when the module is called."""
        return self.execution.schedule.micro_batches > 1 or self.execution.stages > 1

    @property
    def in_words(self) -> str:
        """The kind of execution, for messages."""
        stages = f"{self.execution.stages} stages and " if self.execution.stages > 1 else ""
        return f"{stages}{self.execution.schedule.micro_batches} micro-batches"

    @cached_property
    def training_order(self) -> tuple[Action, ...]:
        """All actions of a step of this rank."""
        return self._order(train=True)

    @cached_property
    def forward_order(self) -> tuple[Action, ...]:
        """All actions of the forward passes alone."""
        return self._order(train=False)

    def _order(self, *, train: bool) -> tuple[Action, ...]:
        return () if self.world.stage is None else rank_order(self.execution, self.world.stage, train=train)

    @cached_property
    def backward_begins(self) -> int:
        """The index in the order of a step at which the backward pass begins."""
        return before_backward(self.training_order)

    def draws(self) -> Draws:
        """The draws of the next call: a number of rank 0's torch generator, the same on every rank."""
        if not self.random or self.exact:
            return Draws(exact=self.exact)
        number = int(torch.randint(2**62, ()))
        return Draws(seed=first_rank_says(number, device=self.device))

    def begin(self, whole: Mapping[str, Tensor], *, keep: bool, draws: Draws) -> Call:
        """A call on whole inputs and constants."""
        return Call(self.stages, self.edges, self.tied, whole, keep=keep, draws=draws)

    def output(self, call: Call, place: int) -> Tensor:
        """One output of a call; with stages the stage that makes it tells all ranks."""
        if not self.world.staged:
            return self.stages[0].joined(call.passings[0], place)
        name = self.outputs[place][0]
        number = next(n for n, chunk in enumerate(self.execution.chunks) if name in chunk.whole.program.assignment.outputs)
        stage, tensor = number % self.execution.stages, self.graph.tensors[name]
        if stage == self.world.stage:
            own = self.stages[number].first.outputs
            at = [output for output, _ in own].index(name)
            with aside():
                whole = gather_full(self.stages[number].joined(call.passings[number], at), own[at][1], self.groups).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self.device)
        dist.broadcast(whole, src=self.world.firsts[stage])
        return whole

    def begin_backward(self, call: Call, gradient: float) -> None:
        """Let every micro-batch's loss have this gradient."""
        for number, passing in call.passings.items():
            names = [name for name, _ in self.stages[number].first.outputs]
            for index in range(self.execution.schedule.micro_batches) if self.graph.loss in names else ():
                place = self.stages[number].program(index).output_places[names.index(str(self.graph.loss))]
                shape = local_shape(place[1], self.graph.tensors[place[0]].shape, self._mesh_in_time)
                dtype = getattr(torch, self.graph.tensors[place[0]].dtype)
                passing.returned(index, [place], [torch.full(shape, gradient, dtype=dtype, device=self.device)])

    @property
    def _mesh_in_time(self) -> tuple[int, ...]:
        count = self.execution.schedule.micro_batches
        return (count, *self.groups.mesh.shape) if count > 1 else self.groups.mesh.shape

    @cached_property
    def is_half(self) -> bool:
        """Whether some gradient is in float16, where the loss scale decides which bits are lost."""
        gradients = self.execution.chunks[0].whole.program.assignment.gradients
        return any(self.graph.tensors[name].dtype == "float16" for name in gradients)

    def updates(self, call: Call) -> dict[str, Tensor]:
        """New values of the constants that a call has changed."""
        return {name: value for passing in call.passings.values() for name, value in passing.updates.items()}

    def flush(self, gradients: Mapping[int, Gradients]) -> None:
        """Reduce the gradient shares of several backward passes."""
        for number, stage in self.stages.items():
            for unit in reversed(range(len(stage.units.units))):
                stage.units.reduce(unit, gradients[number], last=True, only_present=True)
            stage.units.settle()
        self.tied.sum(gradients)

    def home(self, gradients: Mapping[int, Gradients]) -> dict[str, Tensor]:
        """The summed gradients of this rank's shards."""
        found: dict[str, Tensor] = {}
        for number, stage in self.stages.items():
            for name, value in stage.units.home(gradients[number]).items():
                found[name] = found[name] + value if name in found else value
        return found
