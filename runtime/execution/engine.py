"""The engine of a planned module: this rank's stages, the order of a step, and its outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
from autopar.runtime.local_forms.randomness import is_random
from autopar.runtime.lowering import Arrival
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.storage import Storages
from autopar.runtime.parameters.torch_layouts import device_mesh
from autopar.runtime.parameters.units import Stored
from autopar.runtime.random_numbers.draw_state import Draws
from autopar.runtime.ranks.agreement import first_rank_says
from autopar.runtime.ranks.collectives import in_movable_type
from autopar.runtime.ranks.current_action import aside
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.world import World
from autopar.runtime.redistribution.steps import gather_full
from autopar.sharding.layout import Layout, local_shape
from autopar.sharding.program import Program
from autopar.sharding.rules import tensors_of_parameters

from .runner import Call, before_backward
from .stage import Neighbours, Stage
from .tied_parameters import TiedSums
from .transfers import edges_of


class Engine:
    """Runs a plan on this rank."""

    def __init__(
        self,
        plan: Program | Execution,
        groups: DeviceGroups | World,
        device: torch.device,
        stored: Stored,
        *,
        exact: bool = False,
    ) -> None:
        if isinstance(plan, Program):
            alone = scheduled(plan)
            plan = Execution(chunks=(Chunk(whole=alone, micro=alone, split=None),))
        self.execution = plan
        self.device = device
        self.stored = stored
        self.world = World.around(groups) if isinstance(groups, DeviceGroups) else groups
        self.graph = plan.graph
        self.trains = plan.chunks[0].whole.trains
        self.constants = tuple(
            tensor.name for tensor in self.graph.tensors.values() if tensor.role is Role.CONSTANT
        )
        # An idle rank has no chunk; a rank of an interleaved pipeline has several.
        chunks: Sequence[int] = ()
        if self.world.stage is not None:
            chunks = range(self.world.stage, len(plan.chunks), plan.stages)
        self.stages = {number: self._stage(number, stored) for number in chunks}
        self.exact = exact
        self.random = is_random(self.graph)
        if exact and self.random and plan.stages > 1:
            raise PlanError(
                "exact_random=True draws one device's random numbers in its order, which stages "
                "do not have; leave it out"
            )
        # The guess of the next call's gradient of the loss: 1, until a caller scales the loss.
        self.loss_gradient = 1.0
        self.lifted: Mapping[str, Tensor] = {}
        """Values of constants that the planned module does not hold."""
        self.plan: Plan | None = None
        """The plan of the execution, if it comes from a plan's file."""

        self.edges = edges_of(plan, self.world, device)
        self.tied = TiedSums(plan, self.world, stored)

    def _stage(self, number: int, stored: Stored) -> Stage:
        chunk = self.execution.chunks[number]
        arrivals: list[Arrival] = []
        # A value for several chunks is handed on once.
        handed: dict[Arrival, None] = {}
        for (source, target), values in self.execution.edges.items():
            if target == number:
                arrivals.extend((value.name, value.taken) for value in values)
            if source == number:
                handed.update(dict.fromkeys((value.name, value.made) for value in values))
        late = self.execution.stages > 1 and schedule_named(self.execution.pipeline).splits
        return Stage(
            chunk.whole,
            chunk.split,
            self.groups,
            stored,
            self.device,
            Neighbours(arrivals=tuple(arrivals), handed=tuple(handed), late=late),
        )

    def copied(self, stored: Stored) -> Engine:
        """A copy of the engine on other parameters."""
        other = copy.copy(self)
        other.stored = stored
        # The process groups exist already, so this meets no other rank.
        other.tied = TiedSums(self.execution, self.world, stored)
        other.stages = {number: stage.on(stored) for number, stage in self.stages.items()}
        return other

    @property
    def groups(self) -> DeviceGroups:
        """This rank's mesh."""
        assert self.world.groups is not None
        return self.world.groups

    @cached_property
    def storages(self) -> Storages:
        """The storages of the parameters of all chunks."""
        return Storages(self.execution, self.world, self.device)

    # --- outputs and constants ---

    @cached_property
    def without_way_back(self) -> frozenset[str]:
        """Tensors made of trained parameters whose gradients the program has no way for.

        They do not lead to the loss.
        """
        ways = self.execution.chunks[0].whole.program.assignment.gradients
        return tensors_of_parameters(self.graph) - ways

    @cached_property
    def lost_outputs(self) -> tuple[str, ...]:
        """Outputs whose gradients this engine does not take, though one with other ends could."""
        if not self.trains or self.gives_gradients_at_once:
            return ()
        return tuple(name for name, _ in self.outputs if name in self.without_way_back)

    def device_mesh(self) -> DeviceMesh:
        """This rank's mesh in torch's words."""
        return device_mesh(self.groups, self.device)

    @cached_property
    def outputs(self) -> tuple[tuple[str, Layout], ...]:
        """Every output with its layout, the loss last if it is no output.

        With stages all outputs are whole on every rank.
        """
        if not self.world.staged:
            return self.stages[0].first.outputs
        planned: set[str] = set()
        for chunk in self.execution.chunks:
            planned.update(chunk.whole.program.assignment.outputs)
        names = list(self.graph.outputs)
        if self.graph.loss and self.graph.loss not in names:
            names.append(self.graph.loss)
        return tuple((name, ()) for name in dict.fromkeys(names) if name in planned)

    @property
    def loss(self) -> int | None:
        """The index of the loss among the outputs."""
        names = [name for name, _ in self.outputs]
        return names.index(self.graph.loss) if self.graph.loss in names else None

    @cached_property
    def host(self) -> frozenset[str]:
        """Parameters whose optimizer state is in host memory."""
        return frozenset().union(
            *(chunk.whole.program.assignment.host for chunk in self.execution.chunks)
        )

    # --- running ---

    @property
    def gives_gradients_at_once(self) -> bool:
        """Whether passes of micro-batches alternate, so that a call makes the gradients at once."""
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
        if self.world.stage is None:
            return ()
        return rank_order(self.execution, self.world.stage, train=train)

    @cached_property
    def backward_begins(self) -> int:
        """The index in the order of a step at which the backward pass begins."""
        return before_backward(self.training_order)

    def draws(self) -> Draws:
        """The draws of the next call: a number of rank 0's torch generator, equal on all ranks."""
        if not self.random or self.exact:
            return Draws(exact=self.exact)
        # Every rank draws one, so that all generators go on alike; rank 0's counts.
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
        number = self._chunk_of(name)
        stage = number % self.execution.stages
        if stage == self.world.stage:
            outputs = self.stages[number].first.outputs
            at = [output for output, _ in outputs].index(name)
            local = self.stages[number].joined(call.passings[number], at)
            # The plan does not price what a caller reads.
            with aside():
                whole = gather_full(local, outputs[at][1], self.groups).contiguous()
        else:
            whole = self._received(name)
        # Ranks of other stages and idle ones take part: they return the output, too.
        dist.broadcast(in_movable_type(whole), src=self.world.firsts[stage])
        return whole

    def _chunk_of(self, output: str) -> int:
        """The number of the chunk that makes what leaves the model."""
        return next(
            number
            for number, chunk in enumerate(self.execution.chunks)
            if output in chunk.whole.program.assignment.outputs
        )

    def _received(self, name: str) -> Tensor:
        """Memory for the whole value of a tensor that another stage makes."""
        tensor = self.graph.tensors[name]
        dtype = getattr(torch, tensor.dtype)
        return torch.empty(tensor.shape, dtype=dtype, device=self.device)

    def begin_backward(self, call: Call, gradient: float) -> None:
        """Let every micro-batch's loss have this gradient."""
        for number, passing in call.passings.items():
            stage = self.stages[number]
            names = [name for name, _ in stage.first.outputs]
            if self.graph.loss is None or self.graph.loss not in names:
                continue
            at = names.index(self.graph.loss)
            for index in range(self.execution.schedule.micro_batches):
                place = stage.program(index).output_places[at]
                tensor = self.graph.tensors[place[0]]
                shape = local_shape(place[1], tensor.shape, self._mesh_in_time)
                dtype = getattr(torch, tensor.dtype)
                start = torch.full(shape, gradient, dtype=dtype, device=self.device)
                passing.returned(index, [place], [start])

    @property
    def _mesh_in_time(self) -> tuple[int, ...]:
        """The mesh with the micro-batches as its first axis, along which values are split, too."""
        count = self.execution.schedule.micro_batches
        return (count, *self.groups.mesh.shape) if count > 1 else self.groups.mesh.shape

    @cached_property
    def is_half(self) -> bool:
        """Whether some gradient is in float16, where the loss scale decides which bits are lost."""
        gradients = self.execution.chunks[0].whole.program.assignment.gradients
        return any(self.graph.tensors[name].dtype == "float16" for name in gradients)

    def updates(self, call: Call) -> dict[str, Tensor]:
        """New values of the constants that a call has changed.

        With stages the one that makes a value tells all ranks, which have these buffers, too.
        """
        own = {
            name: value
            for passing in call.passings.values()
            for name, value in passing.updates.items()
        }
        if not self.world.staged:
            return own
        return {name: self._told(own, name) for name in self.graph.updates}

    def _told(self, own: Mapping[str, Tensor], name: str) -> Tensor:
        """A changed constant on every rank."""
        stage = self._chunk_of(self.graph.updates[name]) % self.execution.stages
        value = self._received(name) if stage != self.world.stage else own[name].contiguous()
        with aside():
            dist.broadcast(in_movable_type(value), src=self.world.firsts[stage])
        return value

    def flush(self, gradients: Mapping[int, Gradients]) -> None:
        """Reduce the gradient shares of several backward passes."""
        for number, stage in self.stages.items():
            stage.units.reduce_present(gradients[number])
        # The sums over stages are made of this stage's own sums, which have come by now.
        self.tied.sum(gradients)

    def home(self, gradients: Mapping[int, Gradients]) -> dict[str, Tensor]:
        """The summed gradients of this rank's shards."""
        home: dict[str, Tensor] = {}
        for number, stage in self.stages.items():
            for name, value in stage.units.home(gradients[number]).items():
                # Two chunks of this rank may hold the same parameter.
                home[name] = home[name] + value if name in home else value
        return home
