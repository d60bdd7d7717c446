"""The candidates for a number of devices, mesh by mesh, in the order in which to try them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.planning.model import FoldedModel, Request
from autopar.planning.model.effort import EFFORT
from autopar.sharding.mesh import Mesh

from .candidates import Candidate, meshes_for, micro_batches_to_try, named_meshes, stage_counts
from .schedules import schedules_of


class CandidateGroups:
    """The candidates of a request, mesh by mesh."""

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded = folded
        self.request = request

    def groups(self, devices: int) -> Iterator[tuple[list[Candidate], list[Candidate]]]:
        """Yield for every mesh the candidates to try, and all of its candidates.

        The latter are needed where pins forbid all of the former.
        """
        cluster = self.request.cluster.sized(devices)
        for stages in self._stage_counts(devices):
            # All numbers are needed only where pins forbid the usual ones.
            counts, every = (self._micro_batches(stages, every=every) for every in (False, True))
            for mesh in self._meshes(devices, stages) if counts else ():
                place = Candidate(cluster=cluster, stages=stages, mesh=mesh, micro_batches=1)
                few, all_of_them = (
                    [replace(place, micro_batches=count) for count in some]
                    for some in (counts, every)
                )
                yield few, all_of_them

    def _stage_counts(self, devices: int) -> Iterator[int]:
        """The numbers of stages to try on so many devices."""
        request = self.request
        cuts = len(self.folded.cuts) - 1
        # Without micro-batches all stages but one would wait.
        if not request.train or self.folded.batch == 1:
            cuts = 0
        within: tuple[float, float] = (1, math.inf)
        if request.space is not None:
            within = request.space.stages
        if request.cuts is not None:
            cuts = min(cuts, len(request.cuts))
        for stages in stage_counts(devices, cuts):
            if request.stages in (None, stages) and within[0] <= stages <= within[1]:
                yield stages

    def _meshes(self, devices: int, stages: int) -> Iterable[Mesh]:
        request = self.request
        mesh = request.mesh
        if mesh is None:
            return meshes_for(request, request.cluster.sized(devices), stages, EFFORT.plain_axes)
        if mesh.devices * stages != devices:
            return ()
        return (mesh,) if request.space is None else named_meshes(mesh, request.space)

    def _micro_batches(self, stages: int, *, every: bool) -> list[int]:
        """The numbers of micro-batches to try with so many stages, or `every` possible one."""
        space = self.request.space
        counts = micro_batches_to_try(self.folded, stages, self.request.micro_batches, every=every)
        if space is not None and space.filled:
            counts = [count for count in counts if count >= stages]
        return [
            count
            for count in counts
            if stages == 1 or schedules_of(self.folded, self.request, stages, count)
        ]
