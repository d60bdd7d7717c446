"""Gradients of a backward pass, by the places of the values from which they come."""

from __future__ import annotations

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

    def add(self, place: PlacedValue, gradient: Tensor) -> None:
        """Add a contribution of the backward pass."""
        self.reached.add(place[0])
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
