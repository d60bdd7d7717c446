"""Plans on the mesh of fewest axes: neighbouring axes that are used alike are joined.

A step over several axes costs what it costs over one axis of as many devices, so a finer mesh
contains the coarser one, and ties between them are common. Of equal plans the one with fewer axes
is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.planning.space.candidates import meshes
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment

from .priced_program import PricedProgram


def joined_mesh(program: PricedProgram) -> Mesh | None:
    """The mesh of fewer axes on which a program lies; None where there is none."""
    mesh = program.assignment.mesh
    shape = joined(mesh.shape, program.assignment)
    return (
        # The joined shape need not exist: an axis has to fit the levels of the cluster.
        next((one for one in meshes(program.tables.prices.cluster) if one.shape == shape), None)
        if shape != mesh.shape
        else None
    )


def joined(shape: Sequence[int], assignment: Assignment) -> tuple[int, ...]:
    """Return the shape of the mesh with axes joined where all layouts are the same on them."""
    layouts = set(_layouts(assignment))
    sizes_joined: list[int] = []
    for axis, size in enumerate(shape):
        if axis and all(layout[axis] == layout[axis - 1] for layout in layouts):
            sizes_joined[-1] *= size
        else:
            sizes_joined.append(size)
    return tuple(sizes_joined)


def _layouts(assignment: Assignment) -> Iterator[Layout]:
    for decision in assignment.decisions.values():
        yield from decision.inputs
        yield from decision.outputs
    yield from assignment.storage.values()
    yield from assignment.outputs.values()
    for chains in assignment.chains.values():
        for chain in chains:
            yield from chain
