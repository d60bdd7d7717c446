"""Gradients of a backward pass, by the places of the values from which they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.order.value_flow import PlacedValue


class Gradients:
    """The gradients of a backward pass so far.

    `at`: by place. `reached`: the names of parameters to which the loss leads.
    """

    def __init__(self) -> None:
        self.at: dict[PlacedValue, Tensor] = {}
        self.reached: set[str] = set()
        # Places whose tensor nothing else holds: only there a gradient is added in place.
        self._own: set[PlacedValue] = set()

    def add(self, place: PlacedValue, gradient: Tensor, *, own: bool = False) -> None:
        """Add a contribution of the backward pass; `own`: nothing else holds its memory."""
        self.reached.add(place[0])
        if own and place not in self.at:
            self._own.add(place)
        self.bring(place, gradient)

    def bring(self, place: PlacedValue, gradient: Tensor) -> None:
        """Add a gradient from another place of the same parameter.

        It may be zeros that stand in where the loss does not lead, so `reached` stays as it is.
        """
        before = self.at.get(place)
        if before is None:
            self.at[place] = gradient
        elif place in self._own:
            before.add_(gradient)
        else:
            self.at[place] = before + gradient
            self._own.add(place)

    def bring_all(self, places: Sequence[PlacedValue], gradients: Sequence[Tensor]) -> None:
        """Add gradients from several places."""
        for place, gradient in zip(places, gradients, strict=True):
            self.bring(place, gradient)

    def copied(self) -> Gradients:
        """A copy in tensors of its own."""
        other = Gradients()
        other.at = {place: gradient.clone() for place, gradient in self.at.items()}
        other.reached = set(self.reached)
        return other

    def join(self, other: Gradients) -> None:
        """Add all of another's."""
        self.reached |= other.reached
        for place, gradient in other.at.items():
            self.bring(place, gradient)

    def drop(self, name: str) -> None:
        """Drop all gradients of a parameter."""
        self.reached.discard(name)
        for place in [place for place in self.at if place[0] == name]:
            self.take(place)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number, or by one that stays on its device."""
        for place, gradient in self.at.items():
            # A factor on a device would be rounded to a gradient of 16 bits before the product.
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            self.at[place] = (wide * factor).to(gradient.dtype)
        # The products are new tensors, so from now on all of them may be added to in place.
        self._own.update(self.at)

    def take(self, place: PlacedValue) -> Tensor | None:
        """The gradient at a place, which is there no longer."""
        self._own.discard(place)
        return self.at.pop(place, None)


def in_own_memory(gradients: Sequence[Tensor | None], others: Sequence[Tensor]) -> list[bool]:
    """Which gradients lie alone in their memory, without overlaps, so that one may add to them.

    Autograd may return one tensor for several values, an expanded one, a part of a larger one, or
    one of the `others`: the tensors that it was given, or has saved.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    held = Counter(tensor.untyped_storage()._cdata for tensor in (*present, *others))
    return [gradient is not None and _is_alone(gradient, held) for gradient in gradients]


def _is_alone(gradient: Tensor, held: Counter[int]) -> bool:
    storage = gradient.untyped_storage()
    # These counts have autograd's own references, too. A view keeps the tensor that it was made of.
    base = gradient._base
    tensors = 1 if base is None else 2
    counts = _count(gradient), torch._C._storage_Use_Count(storage._cdata)
    # The storage is held by its tensors and by the object that asks; the base by its view and here.
    alone = counts == (1, tensors + 1) and (base is None or _count(base) == 2)
    if held[storage._cdata] > 1 or not alone:
        return False
    # That of a weight may be the transpose of a product.
    return gradient.is_contiguous() or (gradient.dim() == 2 and gradient.t().is_contiguous())


def _count(tensor: Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count
