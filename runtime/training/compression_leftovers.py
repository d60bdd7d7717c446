"""Leftovers of low-rank gradients in a checkpoint: each rank's matrix, and the next factors.

Every product of PowerSGD is linear in the ranks' matrices, so only the sum of their leftovers
matters. On the same number of ranks each takes back its own; on another number each takes an equal
share of the sum. Factors are those of a shard's matrix: they are restored if the parameter is cut
into as many shards of the same width, and else start anew, as in a first step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from autopar.runtime.compression import LowRank
from autopar.runtime.execution.stage import Stage
from autopar.runtime.files.piece_tensors import in_pieces
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.torch_layouts import mesh_without_groups, placements_of

from .durable_files import torch_dtype
from .manifest import COMPRESSION, Entry, Manifest

LEFT = ".left"
FACTOR = ".factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factored:
    """A parameter whose gradient travels as factors, with the mesh axes of its sum."""

    name: str
    module: ParallelModule
    stage: Stage
    axes: tuple[int, ...]
    rank: int

    @property
    def held(self) -> LowRank:
        """The leftovers and factors that this rank's stage has, by parameter."""
        return self.stage.units.low_rank

    @property
    def mesh(self) -> tuple[int, ...]:
        """The sizes of the stage's mesh."""
        return self.stage.groups.mesh.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return tuple(self.stage.units.stored(self.name).shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.stage.plan.program.graph.tensors[self.name].shape

    @property
    def sharing(self) -> int:
        """The number of ranks that add up their matrices."""
        return math.prod(self.mesh[axis] for axis in self.axes)

    @property
    def cut(self) -> tuple[Placement, ...]:
        """The stored placements of the parameter."""
        return placements_of(self.stage.plan.program.assignment.storage[self.name], self.mesh)

    @property
    def shards(self) -> int:
        """The number of shards of the parameter."""
        return math.prod(
            size
            for size, placement in zip(self.mesh, self.cut, strict=True)
            if not placement.is_replicate()
        )

    def lefts(self, *, apart: bool = True) -> tuple[Placement, ...]:
        """The placements of the ranks' matrices, stacked: whole, or each rank's own (`apart`)."""
        own: Placement = Shard(0) if apart else Replicate()
        return tuple(
            own if axis in self.axes else _behind(placement)
            for axis, placement in enumerate(self.cut)
        )

    def factors(self) -> tuple[Placement, ...]:
        """The placements of the shards' factors, stacked."""
        return tuple(
            Replicate() if placement.is_replicate() else Shard(0) for placement in self.cut
        )

    def factor_shape(self) -> tuple[int, int, int]:
        """The shape of the shards' factors, stacked."""
        return self.shards, math.prod(self.shape[1:]), self.rank

    def lying(
        self, local: Tensor, shape: Sequence[int], placements: Sequence[Placement]
    ) -> DTensor:
        """A tensor of that shape of which this rank has the part `local`."""
        # Strides of the whole cannot be worked out from a shard whose dim is split unevenly.
        stride = torch.empty(tuple(shape), device="meta").stride()
        groups = self.stage.groups
        mesh = mesh_without_groups(groups.mesh, groups.first, self.module.engine.device)
        size = torch.Size(shape)
        value = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=size, stride=stride
        )
        return in_pieces(value)


def _behind(placement: Placement) -> Placement:
    """The placement of a tensor with one more dim in front."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _factored(module: nn.Module) -> Iterator[_Factored]:
    """The parameters of a module whose gradients travel as factors."""
    if not isinstance(module, ParallelModule):
        return
    for stage in module.engine.stages.values():
        for bucket in (bucket for unit in stage.units.units for bucket in unit.buckets):
            # 0 is no factors; the buckets of the second factors, 2, are of the same parameters.
            if bucket.factor != 1:
                continue
            axes = tuple(itertools.chain.from_iterable(bucket.sums))
            for name, rank in zip(bucket.parameters, bucket.ranks, strict=True):
                yield _Factored(name=name, module=module, stage=stage, axes=axes, rank=rank)


def leftover_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The leftovers and factors to save."""
    tensors: dict[str, Tensor] = {}
    for item in _factored(module):
        key = COMPRESSION + item.name
        if item.name in item.held.left:
            left = item.held.left[item.name].reshape(1, *item.shape)
            tensors[key + LEFT] = item.lying(left, (item.sharing, *item.whole), item.lefts())
        if item.name in item.held.factors:
            factor = item.held.factors[item.name].unsqueeze(0)
            tensors[key + FACTOR] = item.lying(factor, item.factor_shape(), item.factors())
    return tensors


def empty_leftovers(
    module: nn.Module, manifest: Manifest
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Tensors to fill, and a function to call when they are filled.

    The function replaces the module's own leftovers.
    """
    saved = manifest.named(COMPRESSION)
    wanted = list(_factored(module))
    targets: dict[str, Tensor] = {}
    for item in wanted:
        key = COMPRESSION + item.name
        left = saved.get(item.name + LEFT)
        if left is not None and left.shape[1:] == item.whole:
            # On another number of ranks each reads all matrices, whose sum it shares.
            apart = left.shape[0] == item.sharing
            count = 1 if apart else left.shape[0]
            placements = item.lefts(apart=apart)
            targets[key + LEFT] = _room(item, left, (count, *item.shape), placements)
        factor = saved.get(item.name + FACTOR)
        if factor is not None and factor.shape == item.factor_shape():
            local = (1, *factor.shape[1:])
            targets[key + FACTOR] = _room(item, factor, local, item.factors())

    def take() -> None:
        """Replace the module's own leftovers by the filled tensors."""
        for item in wanted:
            item.held.forget(item.name)
            key = COMPRESSION + item.name
            if key + LEFT in targets:
                local = _local(targets[key + LEFT])
                share = local[0] if len(local) == 1 else local.sum(0) / item.sharing
                item.held.left[item.name] = share.reshape(item.shape[0], -1)
            if key + FACTOR in targets:
                item.held.factors[item.name] = _local(targets[key + FACTOR])[0]

    return targets, take


def _room(
    item: _Factored, entry: Entry, local: Sequence[int], placements: Sequence[Placement]
) -> DTensor:
    """A tensor to fill from an entry of the checkpoint, of which this rank reads a `local` part."""
    device = item.module.engine.device
    part = torch.zeros(tuple(local), dtype=torch_dtype(entry.dtype), device=device)
    return item.lying(part, entry.shape, placements)


def _local(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    assert isinstance(value, DTensor)
    return value._local_tensor


def dropped(module: nn.Module, manifest: Manifest) -> list[str]:
    """Parameters with leftovers in the checkpoint that the module cannot use.

    A rank that has one of several stages does not know, and says none.
    """
    # The manifest lists the parameters of all stages, of which this rank has its own.
    if isinstance(module, ParallelModule) and module.engine.world.staged:
        return []
    used = {item.name for item in _factored(module)}
    names = (name.removesuffix(LEFT) for name in manifest.named(COMPRESSION) if name.endswith(LEFT))
    return [name for name in names if name not in used]
