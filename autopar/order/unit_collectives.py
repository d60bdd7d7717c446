"""The collectives that gather a unit's parameters, and those that reduce its gradients.

The members of a group travel in one message, so each step of a group is one collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.sharding.program import Collective, Program, Redistribute, chain_collectives
from autopar.sharding.schedule import PLAIN, Types

from .units import Mode, Unit


def gather_collectives(
    program: Program, unit: Unit, phase: str = "forward"
) -> Iterator[Collective]:
    """Collectives of a unit's gather: one a step for each group."""
    for group in unit.groups:
        yield from _flat([ahead for ahead, _ in _chains(program, group, PLAIN.types)], phase)


def reduce_collectives(
    program: Program, unit: Unit, types: Types, *, last: bool
) -> Iterator[Collective]:
    """Collectives that reduce a unit's gradients in the `last` micro-batch or an earlier one."""
    if last or unit.mode is not Mode.ONCE:
        for group in reversed(unit.groups):
            # The way back undoes the chain from its end.
            yield from _flat([back[::-1] for _, back in _chains(program, group, types)], "backward")
    if last:
        for bucket in unit.buckets:
            for axes in bucket.sums:
                yield Collective(
                    phase="backward",
                    kind="all_reduce",
                    axes=axes,
                    nbytes=bucket.nbytes,
                    tensor=bucket.parameters[0],
                )


def _chains(
    program: Program, group: Sequence[int], types: Types
) -> Iterator[tuple[list[Collective], list[Collective]]]:
    """The collectives of the members one by one."""
    mesh = program.assignment.mesh.shape
    steps = (program.steps[index] for index in group)
    return (
        chain_collectives(program.graph, step, mesh, types)
        for step in steps
        if isinstance(step, Redistribute)
    )


def _flat(each: Sequence[Sequence[Collective]], phase: str) -> Iterator[Collective]:
    """The collectives of the members joined, one for each step that has any."""
    # Members of a group take the same steps, so their k-th collectives are one message.
    for joined in zip(*each, strict=True):
        first = joined[0]
        yield Collective(
            phase=phase,
            kind=first.kind,
            axes=first.axes,
            nbytes=sum(c.nbytes for c in joined),
            tensor=first.tensor,
        )
