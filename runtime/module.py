"""`ParallelModule`: a planned model as an ordinary `nn.Module`, with DTensor parameters and local arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import PlanError
from autopar.order.execution import Execution
from autopar.order.scheduled import scheduled
from autopar.sharding.candidates import is_storable
from autopar.sharding.layout import Kind, Layout, R, format_layout, local_parts, local_shape
from autopar.sharding.program import Program

from .again import gathering_again
from .checkpoint import describe_pieces
from .collectives import DeviceGroups, cuts_of, gather_full, shard_of
from .gradients import GradientBuckets
from .local_program import LocalProgram
from .lowering import lower_scheduled
from .micro_batches import MicroBatches

Values = Mapping[str, Tensor | Callable[[], Tensor]]

describe_pieces()


def device_mesh(groups: DeviceGroups, device: torch.device | str) -> DeviceMesh:
    """The mesh as torch's `DeviceMesh`, on the process groups that exist already."""
    kind = torch.device(device).type
    ranks = torch.arange(groups.mesh.devices).reshape(groups.mesh.shape)
    names = tuple(axis.name for axis in groups.mesh.axes)
    if any(group is None for group in groups.process_groups):
        return DeviceMesh(kind, ranks, mesh_dim_names=names)
    existing: Any = list(groups.process_groups)
    if len(existing) == 1:
        return DeviceMesh.from_group(existing[0], kind, mesh_dim_names=names)
    return DeviceMesh.from_group(existing, kind, mesh=ranks, mesh_dim_names=names)


def placements_of(layout: Layout, mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """A layout in torch's words: a split within parts is a `_StridedShard` with as many parts as are left locally.

    >>> from autopar.sharding.layout import parse_layout
    >>> placements_of(parse_layout("S0 R S1/3"), (2, 2, 2))
    (Shard(dim=0), Replicate(), _StridedShard(dim=1, sf=3))
    """
    if not is_storable(layout, mesh):
        raise PlanError(f"no DTensor lies as [{format_layout(layout)}]: torch cannot split a dim within parts on two axes")
    done = [R] * len(layout)
    found: list[Placement] = []
    for axis, placement in enumerate(layout):
        done[axis] = placement
        if placement.kind is not Kind.SPLIT:
            found.append(Partial(placement.reduction) if placement.kind is Kind.PARTIAL else Replicate())
            continue
        parts = local_parts(tuple(done), axis, mesh)
        found.append(Shard(placement.dim) if parts == 1 else _StridedShard(placement.dim, split_factor=parts))
    return tuple(found)


class ParallelModule(nn.Module):
    """A model under a plan. Parameters keep the original names; the arithmetic is this rank's local program.

    Of an `Execution` the schedule is run, of a bare program the whole batch at once. `values` gives every parameter and constant whole, as
    a tensor or as a function that makes it (called one at a time). `aliases` gives second names of tied parameters. `forward` takes the
    model's whole inputs and returns this rank's outputs in their planned layouts, the loss last where it is not among them. With several
    micro-batches gradients flow from the loss only.
    """

    def __init__(
        self,
        program: Program | Execution,
        groups: DeviceGroups,
        values: Values,
        *,
        device: torch.device | str = "cpu",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        plan = program.whole if isinstance(program, Execution) else scheduled(program)
        split = program.split if isinstance(program, Execution) else None
        self._program = plan.program
        self._groups = groups
        self._device = torch.device(device)
        self._regathers = plan.schedule.gathered == "again"
        self._micro = MicroBatches(plan, split, groups, self._device) if split is not None else None
        self._local: LocalProgram = lower_scheduled(plan, groups, device=device) if self._micro is None else self._micro.first
        self._places: list[tuple[nn.Module, str]] = []
        self._mesh = device_mesh(groups, device) if groups.mesh.devices > 1 else None
        missing = [name for name in (*self._local.parameters, *self._local.constants) if name not in values]
        if missing:
            raise PlanError(f"no values are given for {', '.join(missing[:10])}" + (" and more" if len(missing) > 10 else ""))
        owned = {name: self._parameter(name, values) for name in self._local.parameters}
        for name, parameter in owned.items():
            self._places.append(_attach(self, name, parameter))
        for alias, name in (aliases or {}).items():
            _attach(self, alias, owned[name])
        changed = set(self._local.updates)
        self._constants = [self._whole(n, values).clone() if n in changed else self._whole(n, values) for n in self._local.constants]
        self._buckets = GradientBuckets(owned, plan.program.buckets, groups.axes)
        if self._micro is not None:
            self._micro.buckets = self._buckets

    def attach_buffer(self, paths: Sequence[str], value: Tensor) -> None:
        """Register a buffer under its names; where it is a constant of the program, the program reads it there from now on."""
        own = value.detach().to(self._device, copy=True)
        for path in paths:
            _attach(self, path, own)
            if path in self._local.constants:
                self._constants[self._local.constants.index(path)] = own

    def _whole(self, name: str, values: Values) -> Tensor:
        """A given value, checked against the graph."""
        given, wanted = values[name], self._program.graph.tensors[name]
        value = given.detach() if isinstance(given, Tensor) else given().detach()
        if tuple(value.shape) != wanted.shape or value.dtype != getattr(torch, wanted.dtype):
            raise PlanError(f"{name!r} is {value.dtype} {list(value.shape)}, the plan's model has {wanted.dtype} {list(wanted.shape)}")
        return value.to(self._device)

    def _parameter(self, name: str, values: Values) -> nn.Parameter:
        """This rank's shard of a given value."""
        tensor = self._program.graph.tensors[name]
        layout = self._program.assignment.storage[name]
        return nn.Parameter(self._placed(self._whole(name, values), layout), requires_grad=tensor.trainable)

    def _placed(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's shard, copied out of a whole value, as a DTensor (a plain tensor where there is one device)."""
        mesh = self._groups.mesh.shape
        shard = shard_of(whole, cuts_of(layout, mesh, self._groups.coordinate)).clone(memory_format=torch.contiguous_format)
        assert tuple(shard.shape) == local_shape(layout, tuple(whole.shape), mesh)
        if self._mesh is None:
            return shard
        stride = torch.empty(whole.shape, device="meta").stride()
        return DTensor.from_local(shard, self._mesh, placements_of(layout, mesh), run_check=False, shape=whole.shape, stride=stride)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; whole tensors, such as those of the original model's state dict, are cut into this rank's shards."""
        layouts = {id(parameter): self._program.assignment.storage[name] for name, parameter in self.graph_parameters().items()}
        own: dict[str, Any] = dict(self.named_parameters(remove_duplicate=False))
        given = dict(state_dict)
        for path, value in state_dict.items():
            mine = own.get(path)
            if isinstance(mine, DTensor) and type(value) in (Tensor, nn.Parameter) and value.shape == mine.shape:
                given[path] = self._placed(value.detach().to(self._device, mine.dtype), layouts[id(mine)])
        return super().load_state_dict(given, strict=strict, assign=assign)

    def forward(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        """Run this rank's share of the model on the whole inputs, given in order or by name."""
        places = range(len(self._local.outputs))
        found = self._run(inputs, named, places)
        return tuple(found[place] for place in places)

    def planned_loss(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """The planned loss alone: no other output of a micro-batch outlives it."""
        if self.loss_index is None:
            raise PlanError("the plan is for inference and has no loss; plan with mode='train'")
        return self._run(inputs, named, [self.loss_index])[self.loss_index]

    def _run(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor], wanted: Sequence[int]) -> dict[int, Tensor]:
        """The outputs at the places `wanted`."""
        values, local = self._inputs(inputs, named), self._local
        parameters = [getattr(module, name) for module, name in self._places]
        changed = {name: local.constants.index(name) for name in local.updates}
        # Autograd may keep what a constant was: it gets a copy of those that change.
        constants = [c.clone() if i in changed.values() else c for i, c in enumerate(self._constants)]
        if self._micro is not None:
            whole = dict(zip((*local.constants, *local.inputs), (*constants, *values), strict=True))
            outputs, fresh = self._micro.run(parameters, whole, wanted)
        else:
            with gathering_again() if self._regathers and torch.is_grad_enabled() else nullcontext():
                out: tuple[Tensor, ...] = local.module(*parameters, *constants, *values)
            outputs = {place: out[place] for place in wanted}
            fresh = dict(zip(local.updates, out[len(local.outputs) :], strict=True))
        with torch.no_grad():
            for name, place in changed.items():
                self._constants[place].copy_(fresh[name])
        return outputs

    def _inputs(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> list[Tensor]:
        names = self._local.inputs
        given = dict(zip(names, inputs, strict=False)) | dict(named)
        if len(inputs) > len(names) or set(given) != set(names) or len(inputs) + len(named) != len(names):
            by_name = ", ".join(named) or "none"
            raise PlanError(f"the model takes the inputs {', '.join(names)}; given are {len(inputs)} and {by_name} by name")
        for name in names:
            tensor, wanted = given[name], self._program.graph.tensors[name]
            if tuple(tensor.shape) != wanted.shape or tensor.dtype != getattr(torch, wanted.dtype):
                planned = f"{wanted.dtype} {list(wanted.shape)}"
                raise PlanError(f"input {name!r} is {tensor.dtype} {list(tensor.shape)}, the plan is for {planned}")
        # To another device goes what the program reads of them, inside the program.
        return [given[name].to(self._device) if self._device.type == "cpu" else given[name] for name in names]

    @property
    def local_program(self) -> LocalProgram:
        """The lowered program of this rank."""
        return self._local

    @property
    def loss_index(self) -> int | None:
        """Where the loss stands among the outputs."""
        return self._local.loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without summing them over the ranks; the first backward pass after it sums them."""
        with self._buckets.no_sync():
            yield

    def full_outputs(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The whole outputs on every rank, from what `forward` returned; not part of the planned program."""
        pairs = zip(outputs, self._local.outputs, strict=True)
        return tuple(gather_full(value, layout, self._groups) for value, (_, layout) in pairs)

    def full_value(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor on every rank from this rank's shard of parameter `name` (or of its gradient)."""
        value = local.to_local() if isinstance(local, DTensor) else local
        return gather_full(value.detach(), self._program.assignment.storage[name], self._groups)

    def host_parameters(self) -> list[nn.Parameter]:
        """The parameters whose optimizer state the plan has in host memory (see `host_states`)."""
        return [value for name, value in self.graph_parameters().items() if name in self._program.assignment.host]

    def graph_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the graph, in its order."""
        return {name: getattr(module, leaf) for name, (module, leaf) in zip(self._local.parameters, self._places, strict=True)}


def _attach(root: nn.Module, path: str, value: Tensor) -> tuple[nn.Module, str]:
    """Register a parameter or a buffer under its module path; where the path cannot be one, under the path with underscores."""
    *parents, leaf = path.split(".")
    module = root
    for part in parents:
        child = module._modules.get(part)
        if child is None:
            if not part or hasattr(module, part):
                return _attach(root, path.replace(".", "_"), value)
            child = nn.Module()
            module.add_module(part, child)
        module = child
    if not leaf or hasattr(module, leaf):
        return _attach(root, (path.replace(".", "_") if parents else path) + "_", value)
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value)
    return module, leaf
