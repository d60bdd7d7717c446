"""The table of notations: a name, the systems that write it, and the two converters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.errors import AutoparError, RuleError, UsageError, unknown
from autopar.sharding.layout import Layout, format_layout, parse_layout
from autopar.sharding.mesh import Mesh

from . import dtensor, gspmd, mindspore, oneflow, shardy
from .place import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A system's notation of layouts.

    `says`: kinds of ours that it has: "B" (the kind of the gradient), "P" (partial sums), "parts"
    (splits within parts).
    """

    words: str
    write: Callable[[Layout, Place], str]
    read: Callable[[str, Place], Layout]
    says: frozenset[str] = frozenset()


NOTATIONS: Mapping[str, Notation] = {
    "autopar": Notation(
        words="ours: one of S<dim>, R, B, P for each mesh axis",
        write=lambda layout, _: format_layout(layout),
        read=lambda text, _: parse_layout(text),
        says=frozenset({"B", "P", "parts"}),
    ),
    "dtensor": Notation(
        words="PyTorch's DTensor: a placement for each mesh axis",
        write=dtensor.write,
        read=dtensor.read,
        says=frozenset({"P", "parts"}),
    ),
    "oneflow": Notation(
        words="OneFlow's SBP of n dims",
        write=oneflow.write,
        read=oneflow.read,
        says=frozenset({"P"}),
    ),
    "mindspore": Notation(
        words="MindSpore's device matrix and tensor map", write=mindspore.write, read=mindspore.read
    ),
    "shardy": Notation(
        words="Shardy: mesh axes for each dim",
        write=shardy.write,
        read=shardy.read,
        says=frozenset({"P"}),
    ),
    "jax": Notation(
        words="JAX's PartitionSpec: mesh axes for each dim",
        write=shardy.write_spec,
        read=shardy.read_spec,
    ),
    "gspmd": Notation(words="GSPMD's tile assignment", write=gspmd.write, read=gspmd.read),
}
"""The notations, by name."""


def notation_named(name: str) -> Notation:
    """The notation called `name`; an unknown name is an error that lists the valid ones."""
    if name not in NOTATIONS:
        raise UsageError(unknown("notation", name, NOTATIONS))
    return NOTATIONS[name]


def write_layout(notation: str, layout: Layout, mesh: Mesh, rank: int) -> str:
    """A layout of a tensor of `rank` dims in a notation.

    `RuleError` with the nearest layout if the notation lacks it.

    >>> write_layout("jax", parse_layout("S0 S0"), Mesh.of(x=2, y=4), 2)
    "PartitionSpec(('x', 'y'), None)"
    """
    place = Place(mesh=mesh, rank=rank)
    place.require(layout)
    return notation_named(notation).write(layout, place)


def read_layout(notation: str, text: str, mesh: Mesh, rank: int) -> Layout:
    """The layout that a text means.

    Notations without the kind of the gradient give R where ours may have B.

    >>> format_layout(read_layout("oneflow", "[S(0), B]", Mesh.of(x=2, y=4), 2))
    'S0 R'
    """
    place = Place(mesh=mesh, rank=rank)
    try:
        layout = notation_named(notation).read(text, place)
    except AutoparError:
        raise
    except ValueError as error:
        raise RuleError(
            f"{text[:80]!r}: a number is missing, or too long to be one of a layout"
        ) from error
    place.require(layout)
    return layout
