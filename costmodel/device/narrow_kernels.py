"""The recipes of precision whose kernels a device has."""

from __future__ import annotations

from autopar.errors import ClusterError
from autopar.ir.recipes import NAMES, RECIPES, recipe_named

from .device import Device


def recipes_of(device: Device) -> tuple[str, ...]:
    """The names of the precisions that a device has products for."""
    families = set(device.peak)
    if device.kernels is not None:
        families |= set(device.kernels.peak)
    return tuple(
        name for name in NAMES if name not in RECIPES or families.issuperset(RECIPES[name].needs)
    )


def require_recipe(device: Device, name: str | None) -> None:
    """Raise `ClusterError` unless a device has products for a precision."""
    recipe = recipe_named(name)
    has = recipes_of(device)
    if recipe is not None and recipe.name not in has:
        raise ClusterError(
            f"device {device.name!r} has no products for --precision {recipe.name}; it has those "
            f"for {', '.join(has)}"
        )
