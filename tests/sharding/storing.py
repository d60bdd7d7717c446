"""Every layout in which a parameter may be stored."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.sharding.candidates import is_storable
from autopar.sharding.layout import Layout, R, S, is_valid


def storage_layouts(
    shape: Sequence[int], mesh: Sequence[int], parts: Mapping[int, Sequence[int]]
) -> tuple[Layout, ...]:
    """On each axis whole, or split on a dim (in `parts[dim]` parts)."""
    kinds = [
        R,
        *(S(dim, q) for dim in range(len(shape)) if shape[dim] > 1 for q in parts.get(dim, (1,))),
    ]
    layouts = itertools.product(kinds, repeat=len(mesh))
    return tuple(
        layout for layout in layouts if is_valid(layout, shape, mesh) and is_storable(layout, mesh)
    )
