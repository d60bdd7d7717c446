"""`GlobalTensor`: a tensor of the whole's shape, of which this rank holds a part.

Torch's functions run on the parts.

A part is an ordinary tensor with an ordinary autograd history, with redistributions wherever parts
had to move. Value and gradient follow the kinds of the layout, so a backward pass on every rank
gives every leaf the gradient of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.runtime.parameters.torch_layouts import placements_of
from autopar.runtime.redistribution.steps import apply_chain
from autopar.sharding.layout import Kind, Layout, P, R, format_layout, local_shape
from autopar.sharding.redistribution import without_gradient

from .choosing import chain
from .handing import Hand, stand_in
from .placement import TensorPlacement, device_mesh_of, placement
from .sbp import Sbp, Words, layout_of_words, require_even, words_of_layout


class Runs:
    """The implementation of torch's functions on global tensors, set by `functions`."""

    call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


RUNS = Runs()


class GlobalTensor(Tensor):
    """A tensor on several ranks, with the shape of the whole.

    `part`: this rank's part (a stand-in if it holds nothing). `kinds`: the layout on the mesh of
    `placement`.
    """

    part: Tensor
    kinds: Layout
    placement: TensorPlacement

    @staticmethod
    def __new__(
        cls, part: Tensor, kinds: Layout, placement: TensorPlacement, shape: Sequence[int]
    ) -> GlobalTensor:
        tensor: GlobalTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=part.dtype, device=placement.device
        )
        return tensor

    def __init__(
        self, part: Tensor, kinds: Layout, placement: TensorPlacement, shape: Sequence[int]
    ) -> None:
        self.part = part
        self.kinds = kinds
        self.placement = placement
        if placement.here:
            assert tuple(part.shape) == local_shape(kinds, tuple(shape), placement.mesh.shape), (
                part.shape,
                format_layout(kinds),
                shape,
            )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return RUNS.call(func, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(
            f"{func} reached a global tensor by another way than torch's functions: take "
            "x.to_local() or x.full()"
        )

    @property
    def sbp(self) -> tuple[Sbp, ...]:
        """The layout in words, one for each axis of the placement."""
        return words_of_layout(self.kinds)

    def brought(self, kinds: Layout) -> Self:
        """The same tensor in another layout on its ranks."""
        flows = self.part.requires_grad and torch.is_grad_enabled()
        source, target = (
            (self.kinds, kinds)
            if flows
            else (without_gradient(self.kinds), without_gradient(kinds))
        )
        if source == target:
            return self if self.kinds == target else self._as(self.part, target)
        if not self.placement.here:
            return self._as(stand_in(self.part.dtype, self.placement.device, [self.part]), target)
        steps = chain(
            source,
            target,
            tuple(self.shape),
            self.part.element_size(),
            self.placement.mesh.shape,
            flows,
        )
        return self._as(
            apply_chain(self.part, steps, self.placement.groups(), gradient=flows), target
        )

    def _as(self, part: Tensor, kinds: Layout) -> Self:
        return type(self)(part, kinds, self.placement, self.shape)

    def settled(self) -> Self:
        """The same tensor in a layout that a user may see.

        It is whole where its gradient would be a share.
        """
        return self.brought(
            tuple(R if placement.kind is Kind.BROADCAST else placement for placement in self.kinds)
        )

    def summed(self) -> Self:
        """The same tensor with partial values summed."""
        return self.brought(
            tuple(R if p.kind in (Kind.BROADCAST, Kind.PARTIAL) else p for p in self.kinds)
        )

    def whole(self) -> Self:
        """The same tensor, whole on each of its ranks."""
        return self.brought((R,) * len(self.kinds))

    def to_global(
        self, placement: TensorPlacement | None = None, sbp: Words | None = None
    ) -> GlobalTensor:
        """The same tensor in the layout `sbp` on `placement`; omitted ones stay.

        A tensor travels to other ranks whole.
        """
        where = placement or self.placement
        if sbp is None and len(where.mesh.axes) != len(self.kinds):
            raise UsageError(
                f"the placement has {len(where.mesh.axes)} axes, the tensor lies on "
                f"{len(self.kinds)}: say how, with sbp"
            )
        kinds = layout_of_words(self.sbp if sbp is None else sbp, len(where.mesh.axes), self.dim())
        require_even(kinds, self.shape, where.mesh.shape)
        if where == self.placement:
            return self.brought(kinds)
        return handed(self.whole(), where).brought(kinds)

    def to_local(self) -> Tensor:
        """This rank's part; an empty tensor on ranks that hold none of it."""
        return self.settled().part

    def full(self) -> Tensor:
        """The whole tensor on every running rank, in its placement or not.

        It is a plain tensor without a gradient.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        with torch.no_grad():
            whole: Tensor = handed(self.whole(), placement(self.placement.type, range(size))).part
        return whole.clone()

    def to_dtensor(self) -> DTensor:
        """The tensor as torch's DTensor, with its history; all ranks call this."""
        settled = self.settled()
        mesh = device_mesh_of(self.placement, dist.group.WORLD)
        places = placements_of(settled.kinds, self.placement.mesh.shape)
        shape = torch.Size(tuple(self.shape))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            settled.part, mesh, places, run_check=False, shape=shape, stride=stride
        )


def handed(tensor: GlobalTensor, where: TensorPlacement) -> GlobalTensor:
    """Bring a tensor that is whole on each of its ranks to the ranks of another placement."""
    given = (
        tensor.part,
        tensor.placement.numbers,
        where.numbers,
        tuple(tensor.shape),
        where.device,
    )
    part: Tensor = Hand.apply(*given)  # type: ignore[no-untyped-call]
    return GlobalTensor(part, (R,) * len(where.mesh.axes), where, tensor.shape)


def gradient_kinds(kinds: Layout) -> Layout:
    """The layout of a tensor's gradient."""
    turned = {Kind.PARTIAL: R, Kind.BROADCAST: P}
    return tuple(turned.get(placement.kind, placement) for placement in kinds)
