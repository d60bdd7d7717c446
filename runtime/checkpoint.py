"""Checkpoints of shards that are split within parts: `torch.distributed.checkpoint` is told where their pieces lie.

A DTensor describes itself to the checkpoint by three methods, and torch's own know one contiguous piece a rank. A shard of
S0/3, say (a column split of a fused query-key-value projection), is three pieces of the whole. The methods here know several;
a shard in one piece is left to torch. Parameters and optimizer states alike can so be saved under one plan and loaded under another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from .parameters import local_of

_TORCH_WRITES: Any = DTensor.__create_write_items__
_TORCH_CHUNKS: Any = DTensor.__create_chunk_list__
_TORCH_SHARD: Any = DTensor.__get_tensor_shard__


class Run(NamedTuple):
    """Indices that lie together along one dim: where in the shard, where in the whole, and how many."""

    local: int
    whole: int
    length: int


def runs_of(size: int, cuts: Sequence[tuple[int, int, int]]) -> list[Run]:
    """The runs of one dim after cuts of (parts, degree, coordinate), each within what the cuts before it leave.

    >>> runs_of(12, [(3, 2, 1)])
    [Run(local=0, whole=2, length=2), Run(local=2, whole=6, length=2), Run(local=4, whole=10, length=2)]
    """
    indices = torch.arange(size)
    for parts, degree, coordinate in cuts:
        indices = indices.reshape(parts, degree, -1)[:, coordinate].flatten()
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    starts, ends = [0, *breaks], [*breaks, len(indices)]
    return [Run(start, int(indices[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def pieces_of(tensor: DTensor) -> list[tuple[Run, ...]]:
    """The pieces of this rank's shard, as a run for each dim; empty where it is a single one, or not split within parts."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return []
    cuts: dict[int, list[tuple[int, int, int]]] = {}
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard) or placement.is_shard():
            parts = placement.split_factor if isinstance(placement, _StridedShard) else 1
            cuts.setdefault(placement.dim, []).append((int(parts), mesh.size(axis), coordinate[axis]))  # type: ignore[attr-defined]
    for dim, own in cuts.items():
        left = tensor.shape[dim]
        for parts, degree, _ in own:
            if left % (parts * degree):
                return []
            left //= degree
    runs = [runs_of(size, cuts.get(dim, ())) for dim, size in enumerate(tensor.shape)]
    found = list(itertools.product(*runs))
    return found if len(found) > 1 else []


def _chunk(piece: tuple[Run, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(run.whole for run in piece), sizes=torch.Size(run.length for run in piece))


def _write_items(self: DTensor, fqn: str, value: Any) -> list[WriteItem]:
    pieces = pieces_of(self)
    if not pieces:
        items: list[WriteItem] = _TORCH_WRITES(self, fqn, value)
        return items
    properties = TensorProperties.create_from_tensor(local_of(self))
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
        )
        for chunk in map(_chunk, pieces)
    ]


def _chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
    pieces = pieces_of(self)
    chunks: list[ChunkStorageMetadata] = [_chunk(piece) for piece in pieces] if pieces else _TORCH_CHUNKS(self)
    return chunks


def _tensor_shard(self: DTensor, index: MetadataIndex) -> Tensor:
    """The piece that begins at the index, a view of the shard."""
    for piece in pieces_of(self):
        if index.offset == torch.Size(run.whole for run in piece):
            local = local_of(self)
            for dim, run in enumerate(piece):
                local = local.narrow(dim, run.local, run.length)
            return local
    shard: Tensor = _TORCH_SHARD(self, index)
    return shard


def describe_pieces() -> None:
    """Give DTensor the methods of this file; once is enough."""
    methods = {"__create_write_items__": _write_items, "__create_chunk_list__": _chunk_list, "__get_tensor_shard__": _tensor_shard}
    for name, method in methods.items():
        setattr(DTensor, name, method)
