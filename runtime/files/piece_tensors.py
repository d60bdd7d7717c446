"""Shards that are split within parts, as `torch.distributed.checkpoint` must know them.

A DTensor describes itself to the checkpoint by three methods, and torch's own methods know one
contiguous piece a rank. A shard of S0/3, say (a column split of a fused query-key-value
projection), is three pieces of the whole. Such a shard is a `PieceTensor`, whose methods know
several pieces, and so are results of it in the same layout. This is how parameters and optimizer
states saved under one plan load under another. A shard in one piece is an ordinary DTensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from autopar.runtime.ranks.uncompiled import runs_as_it_is


class Run(NamedTuple):
    """Indices that lie together along one dim.

    `local`, `whole`: where they begin in the shard and in the whole. `length`: how many they are.
    """

    local: int
    whole: int
    length: int


def runs_of(size: int, cuts: Sequence[tuple[int, int, int]]) -> list[Run]:
    """The runs of one dim after cuts of (parts, degree, coordinate), taken one after the other.

    >>> for run in runs_of(12, [(3, 2, 1)]):
    ...     print(run)
    Run(local=0, whole=2, length=2)
    Run(local=2, whole=6, length=2)
    Run(local=4, whole=10, length=2)
    """
    indices = torch.arange(size)
    for parts, degree, coordinate in cuts:
        indices = indices.reshape(parts, degree, -1)[:, coordinate].flatten()
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    starts = [0, *breaks]
    ends = [*breaks, len(indices)]
    return [
        Run(start, int(indices[start]), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def pieces_of(tensor: DTensor) -> list[tuple[Run, ...]]:
    """The pieces of this rank's shard, as a run for each dim.

    There are none for a single piece, or without a split within parts.
    """
    mesh = tensor.device_mesh
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not any(
        isinstance(placement, _StridedShard) for placement in tensor.placements
    ):
        return []
    cuts: dict[int, list[tuple[int, int, int]]] = {}
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard) or placement.is_shard():
            parts = placement.split_factor if isinstance(placement, _StridedShard) else 1
            dim = placement.dim  # type: ignore[attr-defined]
            cuts.setdefault(dim, []).append((int(parts), mesh.size(axis), coordinate[axis]))
    for dim, own in cuts.items():
        size = tensor.shape[dim]
        for parts, degree, _ in own:
            # Uneven splits are no plan's: a caller has made this tensor.
            if size % (parts * degree):
                return []
            size //= degree
    runs = [runs_of(size, cuts.get(dim, ())) for dim, size in enumerate(tensor.shape)]
    pieces = list(itertools.product(*runs))
    return pieces if len(pieces) > 1 else []


def _chunk(piece: tuple[Run, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(run.whole for run in piece),
        sizes=torch.Size(run.length for run in piece),
    )


class PieceTensor(DTensor):
    """A DTensor whose shard may lie in several pieces of the whole; its arithmetic is DTensor's."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As DTensor's; results that are split within parts are `PieceTensor`s too."""
        return _arithmetic(super().__torch_dispatch__, func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        """Reassemble a tensor that a compiler has taken apart."""
        whole = DTensor.__tensor_unflatten__(  # type: ignore[no-untyped-call]
            inner_tensors, flatten_spec, outer_size, outer_stride
        )
        return in_pieces(whole)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """The items of this rank's shard for a checkpoint."""
        pieces = pieces_of(self)
        if not pieces:
            items: list[WriteItem] = super().__create_write_items__(fqn, object)
            return items
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in map(_chunk, pieces)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The places of the pieces in the whole."""
        if pieces := pieces_of(self):
            return list(map(_chunk, pieces))
        whole: list[ChunkStorageMetadata]
        whole = super().__create_chunk_list__()  # type: ignore[no-untyped-call]
        return whole

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The piece that begins at the index, a view of the shard."""
        for piece in pieces_of(self):
            if index.offset == torch.Size(run.whole for run in piece):
                local = self._local_tensor
                for dim, run in enumerate(piece):
                    local = local.narrow(dim, run.local, run.length)
                return local
        shard: Tensor = super().__get_tensor_shard__(index)  # type: ignore[no-untyped-call]
        return shard


@runs_as_it_is
def _arithmetic(plain: Callable[..., Any], *args: Any) -> Any:
    return pytree.tree_map_only(DTensor, in_pieces, plain(*args))


def in_pieces(tensor: DTensor) -> DTensor:
    """The same tensor, able to describe its pieces where its shard is split within parts."""
    if isinstance(tensor, PieceTensor) or not any(
        isinstance(placement, _StridedShard) for placement in tensor.placements
    ):
        return tensor
    return PieceTensor(  # type: ignore[no-untyped-call]
        tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad
    )
