"""How long a pipeline is likely to wait, for the order in which first programs are tried.

A pipeline of p stages of v chunks waits (p - 1) / v passes for its m micro-batches, so that a step
takes 1 + (p - 1) / (v m) times as long as without waiting (Narayanan et al., 2021). Here a chunk
has at least one layer. Bounds cannot assume that, as plans may cut inside layers.
"""

from __future__ import annotations

from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.space.candidates import Candidate


class Waits:
    """The waiting of pipelines of one model."""

    def __init__(self, folded: FoldedModel) -> None:
        self._layers = max((run.layers for run in folded.runs), default=1)

    def factor(self, candidate: Candidate) -> float:
        """The factor by which waiting is likely to lengthen a candidate's step."""
        chunks = max(self._layers // candidate.stages, 1)
        return 1 + (candidate.stages - 1) / (chunks * candidate.micro_batches)
