"""Leftovers of low-rank gradients in a checkpoint: each rank's matrix, and the factors that start the next step.

Every product of PowerSGD is linear in the ranks' matrices, so only the sum of their leftovers matters. On the same
number of ranks each takes back its own; on another number each takes an equal share of the sum. Factors are those of a
shard's matrix: they are restored if the parameter is cut into as many shards of the same width, and else start anew, as
in a first step.
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

from ..compression import LowRank
from ..module import ParallelModule
from ..parameters import mesh_without_groups, placements_of
from ..piece_tensors import in_pieces
from ..stage import Stage
from .manifest import COMPRESSION, Entry, Manifest
from .storage import torch_dtype

LEFT, FACTOR = ".left", ".factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factored:
    """A parameter whose gradient travels as factors, with the mesh axes of its sum.

    `sharing`: the number of ranks that add up their matrices. `shards`: the number of shards of the parameter on other
    axes.
    """

    name: str
    module: ParallelModule
    stage: Stage
    axes: tuple[int, ...]
    rank: int

    @property
    def held(self) -> LowRank:
        return self.stage.units.low_rank

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.stage.groups.mesh.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stage.units.stored(self.name).shape)

    @property
    def whole(self) -> tuple[int, ...]:
        return self.stage.plan.program.graph.tensors[self.name].shape

    @property
    def sharing(self) -> int:
        return math.prod(self.mesh[axis] for axis in self.axes)

    @property
    def cut(self) -> tuple[Placement, ...]:
        """The stored placements of the parameter."""
        return placements_of(self.stage.plan.program.assignment.storage[self.name], self.mesh)

    @property
    def shards(self) -> int:
        return math.prod(size for size, placement in zip(self.mesh, self.cut, strict=True) if not placement.is_replicate())

    def lefts(self, *, apart: bool = True) -> tuple[Placement, ...]:
        """The placements of the ranks' matrices, stacked: whole, or each rank's `apart`."""
        return tuple(
            (Shard(0) if apart else Replicate()) if axis in self.axes else _behind(placement) for axis, placement in enumerate(self.cut)
        )

    def factors(self) -> tuple[Placement, ...]:
        return tuple(Replicate() if placement.is_replicate() else Shard(0) for placement in self.cut)

    def factor_shape(self) -> tuple[int, int, int]:
        return self.shards, math.prod(self.shape[1:]), self.rank

    def lying(self, local: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> DTensor:
        """A tensor of that shape of which this rank has `local`."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        groups = self.stage.groups
        mesh = mesh_without_groups(groups.mesh, groups.first, self.module.engine.device)
        return in_pieces(DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride))


def _behind(placement: Placement) -> Placement:
    """The placement of a tensor with one more dim in front."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _factored(module: nn.Module) -> Iterator[_Factored]:
    for stage in module.engine.stages.values() if isinstance(module, ParallelModule) else ():
        for bucket in (bucket for unit in stage.units.units for bucket in unit.buckets if bucket.factor == 1):
            for name, rank in zip(bucket.parameters, bucket.ranks, strict=True):
                assert isinstance(module, ParallelModule)
                yield _Factored(name=name, module=module, stage=stage, axes=tuple(itertools.chain.from_iterable(bucket.sums)), rank=rank)


def leftover_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The leftovers and factors to save."""
    found: dict[str, Tensor] = {}
    for one in _factored(module):
        if one.name in one.held.left:
            left = one.held.left[one.name].reshape(1, *one.shape)
            found[COMPRESSION + one.name + LEFT] = one.lying(left, (one.sharing, *one.whole), one.lefts())
        if one.name in one.held.factors:
            factor = one.held.factors[one.name].unsqueeze(0)
            found[COMPRESSION + one.name + FACTOR] = one.lying(factor, one.factor_shape(), one.factors())
    return found


def empty_leftovers(module: nn.Module, manifest: Manifest) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Tensors to fill, and a function to call afterwards, which replaces the module's own leftovers."""
    saved, wanted = manifest.named(COMPRESSION), list(_factored(module))
    targets: dict[str, Tensor] = {}
    for one in wanted:
        if (entry := saved.get(one.name + LEFT)) is not None and entry.shape[1:] == one.whole:
            apart = entry.shape[0] == one.sharing
            count = 1 if apart else entry.shape[0]
            targets[COMPRESSION + one.name + LEFT] = _room(one, entry, (count, *one.shape), one.lefts(apart=apart))
        if (entry := saved.get(one.name + FACTOR)) is not None and entry.shape == one.factor_shape():
            targets[COMPRESSION + one.name + FACTOR] = _room(one, entry, (1, *entry.shape[1:]), one.factors())

    def take() -> None:
        for one in wanted:
            one.held.forget(one.name)
            if (left := targets.get(COMPRESSION + one.name + LEFT)) is not None:
                local = _local(left)
                share = local[0] if len(local) == 1 else local.sum(0) / one.sharing
                one.held.left[one.name] = share.reshape(one.shape[0], -1)
            if (factor := targets.get(COMPRESSION + one.name + FACTOR)) is not None:
                one.held.factors[one.name] = _local(factor)[0]

    return targets, take


def _room(one: _Factored, entry: Entry, local: Sequence[int], placements: Sequence[Placement]) -> DTensor:
    device = one.module.engine.device
    return one.lying(torch.zeros(tuple(local), dtype=torch_dtype(entry.dtype), device=device), entry.shape, placements)


def _local(value: Tensor) -> Tensor:
    assert isinstance(value, DTensor)
    return value._local_tensor


def dropped(module: nn.Module, manifest: Manifest) -> list[str]:
    """Parameters with leftovers in the checkpoint that the module cannot use, as far as this rank knows."""
    if isinstance(module, ParallelModule) and module.engine.world.staged:
        return []
    used = {one.name for one in _factored(module)}
    names = (name.removesuffix(LEFT) for name in manifest.named(COMPRESSION) if name.endswith(LEFT))
    return [name for name in names if name not in used]
