"""Reads and writes at places along split dims.

Elements of other shards read as zero, and are not written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Ref, Value
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.registry import register

from .shard_lookup import wrapped_shard_index

Splits = Sequence[tuple[int, int, Cuts]]
"""Each split dim, its size in the whole tensor, and the cuts that lead to this rank's shard."""


def _read_rows(kind: str, name: str, splits: Splits, **arguments: Any) -> Tensor:
    """Read one dim at the places `name`, as `gather` and `index_select` do."""
    ((dim, size, cuts),) = splits
    local, inside = wrapped_shard_index(arguments[name], size, cuts)
    out: Tensor = function_of(kind)(**{**arguments, name: local})
    # `index_select` has one index for whole slices.
    if inside.dim() < out.dim():
        inside = inside.reshape(*(-1 if i == dim else 1 for i in range(out.dim())))
    return torch.where(inside, out, 0.0)


def _read_places(
    kind: str, splits: Splits, self: Tensor, indices: Sequence[Tensor | None]
) -> Tensor:
    """Read `self[:, i, j]`."""
    local = list(indices)
    dims = [dim for dim, index in enumerate(local) if index is not None]
    held = torch.ones((), dtype=torch.bool, device=self.device)
    for dim, size, cuts in splits:
        index = local[dim]
        assert index is not None
        local[dim], inside = wrapped_shard_index(index, size, cuts)
        held = held & inside
    out: Tensor = function_of(kind)(self, local)
    # The result has the indices' dims in place of neighbouring ones, in front of scattered ones.
    together = dims[-1] - dims[0] == len(dims) - 1
    behind = self.dim() - 1 - dims[-1] if together else self.dim() - len(dims)
    return torch.where(held.reshape(*held.shape, *(1,) * behind), out, 0.0)


def _write_rows(kind: str, name: str, splits: Splits, self: Tensor, **arguments: Any) -> Tensor:
    """Write one dim at the places `name`, as `scatter` and `index_add` do.

    Elements of other shards go to a row past the end, which is cut off.
    """
    ((dim, size, cuts),) = splits
    local, inside = wrapped_shard_index(arguments[name], size, cuts)
    rows = self.shape[dim]
    places = torch.where(inside, local, rows)
    wide = function_of(kind)(self=_with_spare(self, [dim]), **{**arguments, name: places})
    out: Tensor = wide.narrow(dim, 0, rows)
    return out


def _write_places(
    kind: str, splits: Splits, self: Tensor, indices: Sequence[Tensor | None], **arguments: Any
) -> Tensor:
    """Write `self[:, i, j] = values`; elements of other shards go to rows past the ends."""
    places = list(indices)
    for dim, size, cuts in splits:
        index = places[dim]
        assert index is not None
        local, inside = wrapped_shard_index(index, size, cuts)
        places[dim] = torch.where(inside, local, self.shape[dim])
    wide = _with_spare(self, [dim for dim, _, _ in splits])
    out: Tensor = function_of(kind)(self=wide, indices=places, **arguments)
    for dim, _, _ in splits:
        out = out.narrow(dim, 0, self.shape[dim])
    return out


def _with_spare(whole: Tensor, dims: Sequence[int]) -> Tensor:
    """A tensor with another row at the end of each of the dims."""
    pad = [0] * (2 * whole.dim())
    for dim in dims:
        pad[2 * (whole.dim() - 1 - dim) + 1] = 1
    return torch.constant_pad_nd(whole, pad)


def _placed(call: LocalCall) -> Mapping[str, Value] | None:
    """The split dims of a read or write at places, and this rank's shards of them."""
    attributes = call.operator.attributes
    rank = len(call.inputs[0].shape)
    dim = attributes.get("dim")
    indices = attributes.get("indices")
    by_dim: dict[int, Ref] = {}
    if isinstance(indices, tuple):
        by_dim = {i: index for i, index in enumerate(indices) if isinstance(index, Ref)}
    # A mask is no list of places: its operator's dims are not split.
    if any(call.inputs[index.index].dtype in ("bool", "uint8") for index in by_dim.values()):
        return None
    named = list(by_dim)
    dims = [dim % rank] if isinstance(dim, int) and rank else named
    cuts = call.cuts(call.decision.inputs[0])
    held = {d: tuple(tuple(cut) for cut in cuts if cut.dim == d) for d in dims}
    splits = tuple((d, call.inputs[0].shape[d], own) for d, own in held.items() if own)
    return {"splits": splits} if splits else None


def _enter(function: Callable[..., Tensor], kinds: str, name: str = "") -> None:
    """Register local forms that take the split dims as `splits` beside the operator's arguments."""
    named = {"name": name} if name else {}
    for kind in kinds.split():
        register(kind, knows=_placed, local=functools.partial(function, kind, **named))


_enter(_read_rows, "aten.gather.default aten.index_select.default", "index")
_enter(_read_rows, "aten.take_along_dim.default", "indices")
_enter(_read_places, "aten.index.Tensor aten._unsafe_index.Tensor")
_enter(
    _write_rows,
    """aten.scatter.src aten.scatter.value aten.scatter.reduce aten.scatter.value_reduce
    aten.scatter_add.default aten.scatter_reduce.two aten.index_add.default
    aten.index_copy.default aten.index_fill.int_Scalar aten.index_fill.int_Tensor
    aten.index_reduce.default""",
    "index",
)
_enter(
    _write_places,
    "aten.index_put.default aten._unsafe_index_put.default aten._index_put_impl.default",
)
