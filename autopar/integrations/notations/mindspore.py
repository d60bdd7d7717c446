"""MindSpore's layouts.

A device matrix, and for each dim a place in it, counted from the right (-1: not split).

A device matrix (2, 4) and a tensor map (1, -1) split dim 0 over the first of the two axes. A dim
that several axes split names them all, major first: ((1, 0), -1).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh

from .place import Place, axes_of, no_partial, whole_splits

Entry = int | tuple[int, ...]
_NEAREST = "give it as it is after its sum (R)"
_TEXT = re.compile(
    r"device_matrix=(?P<matrix>[(\[][\d,\s]*[)\]])\s*,?\s*"
    r"tensor_map=(?P<map>[(\[][-\d,\s()\[\]]*[)\]])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """MindSpore's words for a layout."""

    device_matrix: tuple[int, ...]
    tensor_map: tuple[Entry, ...]

    def __str__(self) -> str:
        return f"device_matrix={self.device_matrix} tensor_map={self.tensor_map}"


def tensor_layout(layout: Layout, mesh: Mesh, rank: int) -> TensorLayout:
    """A layout in MindSpore's words.

    >>> from autopar.sharding.layout import parse_layout
    >>> print(tensor_layout(parse_layout("S0 S1"), Mesh.of(dp=2, mp=4), 2))
    device_matrix=(2, 4) tensor_map=(1, 0)
    """
    whole_splits(layout, "MindSpore's tensor map")
    no_partial(layout, "MindSpore's tensor map", _NEAREST)
    last = len(mesh.axes) - 1
    entries = [tuple(last - axis for axis in axes) for axes in axes_of(layout, rank)]
    return TensorLayout(device_matrix=mesh.shape, tensor_map=tuple(map(_entry, entries)))


def _entry(places: tuple[int, ...]) -> Entry:
    if not places:
        return -1
    return places[0] if len(places) == 1 else places


def layout_of(tensor_layout: TensorLayout, place: Place) -> Layout:
    """The layout that a device matrix and a tensor map describe.

    The matrix must be that of the mesh.
    """
    if tensor_layout.device_matrix != place.mesh.shape:
        raise RuleError(
            f"{tensor_layout}: the mesh is {place.mesh}; the device matrix must be "
            f"{place.mesh.shape}"
        )
    last = len(tensor_layout.device_matrix) - 1
    dims = []
    for entry in tensor_layout.tensor_map:
        several = (entry,) if isinstance(entry, int) else entry
        places = [place_of_axis for place_of_axis in several if place_of_axis != -1]
        if any(not 0 <= place_of_axis <= last for place_of_axis in places):
            raise RuleError(
                f"{tensor_layout}: {entry} is none of the places 0 to {last} from the right, nor -1"
            )
        dims.append([last - place_of_axis for place_of_axis in places])
    return place.from_dims(dims, text=str(tensor_layout))


def write(layout: Layout, place: Place) -> str:
    """The device matrix and the tensor map of a layout, as MindSpore's messages print them."""
    return str(tensor_layout(layout, place.mesh, place.rank))


def read(text: str, place: Place) -> Layout:
    """`device_matrix=(2, 4) tensor_map=(1, -1)`."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise RuleError(f"{text!r} is not of the form device_matrix=(2, 4) tensor_map=(1, -1)")
    try:
        matrix = ast.literal_eval(match["matrix"])
        entries = ast.literal_eval(match["map"])
    except (SyntaxError, ValueError) as error:
        raise RuleError(
            f"{text!r} is not of the form device_matrix=(2, 4) tensor_map=(1, -1)"
        ) from error
    return layout_of(
        TensorLayout(device_matrix=_numbers(matrix), tensor_map=_entries(entries)), place
    )


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (int(str(value)),)


def _entries(value: object) -> tuple[Entry, ...]:
    if not isinstance(value, Sequence):
        return (int(str(value)),)
    return tuple(entry if isinstance(entry, int) else tuple(entry) for entry in value)
