"""Runs priced as by somebody who knows less: nothing of the framework, or nothing of the kernels.

A user without a profile has the habits that most frameworks share; a device that nobody measured
has the kernels of its data sheet, which rows of every group, evenly spaced, are priced by. How far
off they are makes the intervals of such prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .held_out import whole
from .rows import Row, Run, thinned
from .scores import Group, Sample
from .seen import KERNELS, UNFITTED
from .training import BY_NEUTRAL, samples_of

AS_IT_RAN = "as it ran"
NO_PROFILE = "no profile"
NO_KERNELS = "data sheet"
MOST = 24
"""Rows of a group that are priced by data sheets."""
Priced = Mapping[str, Sequence[Group]]
"""Groups by how they were priced."""


def variants(groups: Sequence[Group], rows: Sequence[tuple[Row, Run]]) -> Priced:
    """The groups of whole runs, and training runs priced without profiles and without kernels."""
    return {
        AS_IT_RAN: [group for group in groups if whole(group)],
        NO_PROFILE: unprofiled(groups),
        NO_KERNELS: by_data_sheets(rows),
    }


def unprofiled(groups: Sequence[Group]) -> list[Group]:
    """The groups priced without their profiles, by the names of their runs."""
    return [
        replace(group, name=group.name.removesuffix(BY_NEUTRAL))
        for group in groups
        if group.name.endswith(BY_NEUTRAL)
    ]


def by_data_sheets(rows: Sequence[tuple[Row, Run]]) -> list[Group]:
    """Some rows of each group, by kernels that saw no row of their device."""
    samples: dict[str, list[Sample]] = {}
    chosen = [({**row, UNFITTED: KERNELS}, run) for row, run in thinned(rows, MOST)]
    for (_, run), priced in zip(chosen, samples_of(chosen), strict=True):
        if isinstance(priced, Sample) and priced.timed:
            samples.setdefault(run.group, []).append(priced)
    return [Group(name=name, samples=tuple(members)) for name, members in samples.items()]
