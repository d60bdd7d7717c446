"""A plan that lies alike on neighbouring mesh axes is a plan of the mesh on which these are one axis.

A step over several axes costs what it costs over one axis of as many devices, so a finer mesh contains the coarser one,
and ties between them are common. Of equal plans the one with fewer axes is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..sharding.layout import Layout
from ..sharding.mesh import Mesh
from ..sharding.program import Assignment
from .candidates import meshes
from .pipeline_search import StagedProgram
from .priced_program import PricedProgram


def place_of(found: PricedProgram | StagedProgram) -> tuple[Mesh, int, int]:
    """The mesh of a program's stage, the number of its stages, and of its micro-batches."""
    if isinstance(found, PricedProgram):
        return found.assignment.mesh, 1, found.schedule.micro_batches
    return found.parts[0].group.mesh, found.stages, found.schedule.micro_batches


def joined_mesh(found: PricedProgram | StagedProgram) -> Mesh | None:
    """The mesh of fewer axes on which a program lies; None where there is none."""
    mesh, stages, _ = place_of(found)
    assignments = [found.assignment] if isinstance(found, PricedProgram) else [part.assignment for part in found.parts]
    cluster = (found if isinstance(found, PricedProgram) else found.parts[0]).tables.prices.cluster
    shape = joined(mesh.shape, assignments)
    return next((one for one in meshes(cluster, stages) if one.shape == shape), None) if shape != mesh.shape else None


def joined(shape: Sequence[int], assignments: Iterable[Assignment]) -> tuple[int, ...]:
    """The shape of the mesh with neighbouring axes joined wherever all layouts of the assignments are the same on them."""
    layouts = {layout for assignment in assignments for layout in _layouts(assignment)}
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
