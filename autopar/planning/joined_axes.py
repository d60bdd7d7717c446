"""A plan that lies alike on neighbouring mesh axes is a plan of the mesh on which these are one axis.

A step over several axes costs what it costs over one axis of as many devices, so a finer mesh contains the coarser one,
and ties between them are common. Of equal plans the one with fewer axes is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..sharding.layout import Layout
from ..sharding.mesh import Mesh
from ..sharding.program import Assignment
from .candidates import meshes
from .priced_program import PricedProgram


def joined_mesh(found: PricedProgram) -> Mesh | None:
    """The mesh of fewer axes on which a program lies; None where there is none."""
    mesh = found.assignment.mesh
    shape = joined(mesh.shape, found.assignment)
    return next((one for one in meshes(found.tables.prices.cluster) if one.shape == shape), None) if shape != mesh.shape else None


def joined(shape: Sequence[int], assignment: Assignment) -> tuple[int, ...]:
    """The shape of the mesh with neighbouring axes joined wherever all layouts of an assignment are the same on them."""
    layouts = set(_layouts(assignment))
    found: list[int] = []
    for axis, size in enumerate(shape):
        if axis and all(layout[axis] == layout[axis - 1] for layout in layouts):
            found[-1] *= size
        else:
            found.append(size)
    return tuple(found)


def _layouts(assignment: Assignment) -> Iterator[Layout]:
    for decision in assignment.decisions.values():
        yield from decision.inputs
        yield from decision.outputs
    yield from assignment.storage.values()
    yield from assignment.outputs.values()
    for chains in assignment.chains.values():
        for chain in chains:
            yield from chain
