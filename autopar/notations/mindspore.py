"""MindSpore's layouts: a device matrix, and for each dim a place in it, counted from the right (-1: not split).

A device matrix (2, 4) and a tensor map (1, -1) split dim 0 over the first of the two axes. A dim that several axes
split names them all, major first: ((1, 0), -1).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import RuleError
from ..sharding.layout import Layout
from ..sharding.mesh import Mesh
from .place import Place, axes_of, no_partial, whole_splits

Entry = int | tuple[int, ...]
_NEAREST = "give it as it is after its sum (R)"
_TEXT = re.compile(r"device_matrix=(?P<matrix>[(\[][\d,\s]*[)\]])\s*,?\s*tensor_map=(?P<map>[(\[][-\d,\s()\[\]]*[)\]])")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """MindSpore's words for a layout."""

    device_matrix: tuple[int, ...]
    tensor_map: tuple[Entry, ...]

    def __str__(self) -> str:
        return f"device_matrix={self.device_matrix} tensor_map={self.tensor_map}"


def tensor_layout(layout: Layout, mesh: Mesh, rank: int) -> TensorLayout:
    """A layout in MindSpore's words.

    >>> from ..sharding.layout import parse_layout
    >>> print(tensor_layout(parse_layout("S0 S1"), Mesh.of(dp=2, mp=4), 2))
    device_matrix=(2, 4) tensor_map=(1, 0)
    """
    whole_splits(layout, "MindSpore's tensor map")
    no_partial(layout, "MindSpore's tensor map", _NEAREST)
    last = len(mesh.axes) - 1
    entries = [tuple(last - axis for axis in axes) for axes in axes_of(layout, rank)]
    return TensorLayout(device_matrix=mesh.shape, tensor_map=tuple(-1 if not e else e[0] if len(e) == 1 else e for e in entries))


def layout_of(found: TensorLayout, place: Place) -> Layout:
    """The layout that a device matrix and a tensor map describe; the matrix must be that of the mesh."""
    if found.device_matrix != place.mesh.shape:
        raise RuleError(f"{found}: the mesh is {place.mesh}; the device matrix must be {place.mesh.shape}")
    last = len(found.device_matrix) - 1
    dims = []
    for entry in found.tensor_map:
        places = [p for p in ((entry,) if isinstance(entry, int) else entry) if p != -1]
        if any(not 0 <= p <= last for p in places):
            raise RuleError(f"{found}: {entry} is none of the places 0 to {last} from the right, nor -1")
        dims.append([last - p for p in places])
    return place.from_dims(dims, text=str(found))


def write(layout: Layout, place: Place) -> str:
    """As MindSpore's messages have it."""
    return str(tensor_layout(layout, place.mesh, place.rank))


def read(text: str, place: Place) -> Layout:
    """`device_matrix=(2, 4) tensor_map=(1, -1)`."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise RuleError(f"{text!r} is not of the form device_matrix=(2, 4) tensor_map=(1, -1)")
    try:
        matrix, entries = ast.literal_eval(match["matrix"]), ast.literal_eval(match["map"])
    except (SyntaxError, ValueError) as error:
        raise RuleError(f"{text!r} is not of the form device_matrix=(2, 4) tensor_map=(1, -1)") from error
    return layout_of(TensorLayout(device_matrix=_numbers(matrix), tensor_map=_entries(entries)), place)


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (int(str(value)),)


def _entries(value: object) -> tuple[Entry, ...]:
    if not isinstance(value, Sequence):
        return (int(str(value)),)
    return tuple(entry if isinstance(entry, int) else tuple(entry) for entry in value)
