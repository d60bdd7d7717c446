"""The candidates for a number of devices: meshes, each with its numbers of micro-batches, and those to try first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..sharding.mesh import Mesh
from .bounds import Bounds
from .candidates import LARGE, Candidate, meshes, stage_counts
from .folded_model import FoldedModel
from .request import Request
from .tuning import TUNING


class CandidateGroups:
    """The candidates of a request, mesh by mesh."""

    def __init__(self, folded: FoldedModel, request: Request, bounds: Bounds) -> None:
        self.folded, self.request, self.bounds = folded, request, bounds

    def groups(self, devices: int) -> Iterator[tuple[list[Candidate], list[Candidate]]]:
        """For every mesh of so many devices: the candidates to try, and all candidates, in case pins forbid those."""
        cluster = self.request.cluster.sized(devices)
        for stages in self._stage_counts(devices):
            counts, every = (self._micro_batches(stages, every=every) for every in (False, True))
            for mesh in self._meshes(devices, stages) if counts else ():
                place = Candidate(cluster=cluster, stages=stages, mesh=mesh, micro_batches=1)
                few, all_of_them = ([replace(place, micro_batches=count) for count in some] for some in (counts, every))
                yield few, all_of_them

    def representatives(self, group: Sequence[Candidate]) -> list[list[Candidate]]:
        """The candidates of a mesh in the order to try them, and a second order if micro-batches get too small.

        First comes the candidate with one micro-batch, or with about enough to fill the pipeline. On a large cluster
        the first axis may have more devices than such a micro-batch has samples. Then another order comes before, which
        begins with larger micro-batches, as that axis can split these: what is found rules out most of the others.
        """
        stages, mesh = group[0].stages, group[0].mesh
        filled = 1 if stages == 1 else TUNING.filled * stages
        split = max(self.folded.batch // (mesh.shape[0] if mesh.shape else 1), 1)
        counts = (split, filled) if split < filled / 2 and group[0].cluster.devices > LARGE else (filled,)
        return [sorted(group, key=lambda c: (abs(math.log(c.micro_batches / count)), c.micro_batches)) for count in counts]

    def _stage_counts(self, devices: int) -> Iterator[int]:
        """The numbers of stages to try on so many devices."""
        request, cuts = self.request, len(self.folded.cuts) - 1
        if not request.train or self.folded.batch == 1:
            cuts = 0
        yield from (stages for stages in stage_counts(devices, cuts) if request.stages in (None, stages))

    def _meshes(self, devices: int, stages: int) -> tuple[Mesh, ...]:
        request = self.request
        if request.mesh is not None:
            return (request.mesh,) if request.mesh.devices * stages == devices else ()
        return meshes(request.cluster.sized(devices), stages, TUNING.plain_axes)

    def _micro_batches(self, stages: int, *, every: bool) -> list[int]:
        """The numbers of micro-batches to try with so many stages, or `every` possible one."""
        counts = self.folded.micro_batches(stages, self.request.micro_batches, every=every)
        return [count for count in counts if stages == 1 or self.bounds.schedules(stages, count)]
