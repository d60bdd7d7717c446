"""Creation of global tensors.

They are drawn as the whole, or made of the ranks' parts or of another tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import UsageError
from autopar.runtime.launch import device_of_group
from autopar.runtime.ranks.agreement import first_rank_says
from autopar.sharding.layout import Kind, R

from .exchanging import from_dtensor
from .handing import Hand, stand_in
from .placement import TensorPlacement
from .sbp import Words, layout_of_words, require_even
from .tensor import GlobalTensor

__all__ = [
    "from_dtensor",
    "global_tensor",
    "matmul",
    "ones",
    "randn",
    "to_global",
    "to_local",
    "zeros",
]

matmul = torch.matmul


def _sizes(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], tuple | list) else tuple(size)


class LocalTensor(Tensor):
    """A plain tensor of this rank, which `to_global` brings onto a placement."""

    def to_global(
        self, placement: TensorPlacement | None = None, sbp: Words | None = None
    ) -> GlobalTensor:
        """The tensor on the ranks of `placement`, as of the function `to_global`."""
        return to_global(self.as_subclass(Tensor), placement, sbp)


def _made(
    make: Callable[[], Tensor],
    where: TensorPlacement,
    sbp: Words | None,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> GlobalTensor:
    """A whole that every rank can make, as `sbp` says."""
    if sbp is None:
        raise UsageError("a placement needs sbp beside it: how the tensor lies on each of its axes")
    kinds = layout_of_words(sbp, len(where.mesh.axes), len(shape))
    require_even(kinds, shape, where.mesh.shape)
    whole = make()
    part = whole.to(where.device) if where.here else whole.new_empty(0, device=where.device)
    with torch.no_grad():
        tensor = GlobalTensor(part, (R,) * len(kinds), where, shape).brought(kinds)
    own = GlobalTensor(tensor.part.clone(), kinds, where, shape)
    own.part.requires_grad_(requires_grad)
    return own


def randn(
    *size: Any,
    placement: TensorPlacement | None = None,
    sbp: Words | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Normal random numbers; without a placement a tensor of this rank, with `to_global`.

    With a placement they are drawn from rank 0's generator, so that the whole is the same for any
    `sbp`.
    """
    shape = _sizes(size)
    if placement is None:
        local = torch.randn(shape, dtype=dtype).as_subclass(LocalTensor)
        return local.requires_grad_(requires_grad)
    seed = first_rank_says(int(torch.randint(2**62, ())), device=device_of_group())
    return _made(
        lambda: torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)),
        placement,
        sbp,
        shape,
        requires_grad,
    )


def zeros(
    *size: Any,
    placement: TensorPlacement,
    sbp: Words,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """A global tensor of zeros on `placement`, in the layout `sbp`."""
    shape = _sizes(size)
    return _made(lambda: torch.zeros(shape, dtype=dtype), placement, sbp, shape, requires_grad)


def ones(
    *size: Any,
    placement: TensorPlacement,
    sbp: Words,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """A global tensor of ones on `placement`, in the layout `sbp`."""
    shape = _sizes(size)
    return _made(lambda: torch.ones(shape, dtype=dtype), placement, sbp, shape, requires_grad)


def global_tensor(local: Tensor, placement: TensorPlacement, sbp: Words) -> GlobalTensor:
    """A global tensor of the ranks' parts.

    Parts are shards where it is split, shares where it is partial, and copies elsewhere.

    Ranks outside the placement give a tensor of a part's shape. The part keeps its history, and
    gets its gradient.
    """
    if isinstance(local, GlobalTensor) or not isinstance(local, Tensor):
        raise UsageError(
            f"global_tensor takes a plain tensor, this rank's part, not {type(local).__name__}"
        )
    kinds = layout_of_words(sbp, len(placement.mesh.axes), local.dim())
    shape = list(local.shape)
    for kind, size in zip(kinds, placement.mesh.shape, strict=True):
        if kind.kind is Kind.SPLIT:
            shape[kind.dim] *= size
    device = placement.device
    part = local.to(device) if placement.here else stand_in(local.dtype, device, [local])
    return GlobalTensor(part, kinds, placement, shape)


def to_global(
    value: Tensor, placement: TensorPlacement | None = None, sbp: Words | None = None
) -> GlobalTensor:
    """A tensor on the ranks of `placement`, in the layout of `sbp`.

    Ranks hold parts of a plain tensor, as for `global_tensor`; broadcast on all axes, it is that of
    the placement's first rank.
    """
    if isinstance(value, GlobalTensor):
        return value.to_global(placement, sbp)
    if placement is None or sbp is None:
        raise UsageError("a plain tensor becomes global on a placement, as sbp says: give both")
    kinds = layout_of_words(sbp, len(placement.mesh.axes), value.dim())
    if any(kind != R for kind in kinds):
        return global_tensor(value, placement, sbp)
    first = placement.numbers[:1]
    part: Tensor = Hand.apply(  # type: ignore[no-untyped-call]
        value, first, placement.numbers, tuple(value.shape), placement.device
    )
    return GlobalTensor(part, kinds, placement, value.shape)


def to_local(value: GlobalTensor) -> Tensor:
    """This rank's part of a global tensor."""
    if not isinstance(value, GlobalTensor):
        raise UsageError(f"to_local takes a global tensor, not {type(value).__name__}")
    return value.to_local()
