"""A published run made ready to be priced, whatever file it comes from, and the sample that its price makes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.costmodel.known.configuration import Configuration
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.step import Priced, price

from .scores import Sample
from .sizes import forward_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run: what is priced, and what was measured; `measured`: seconds, `memory`: bytes that torch allocated at the peak, on the stage of
    that index (None: the fullest); `peer`: seconds that another model of the source's own predicts."""

    label: str
    shape: Shape
    configuration: Configuration
    cluster: Cluster
    measured: float | None
    memory: float | None = None
    stage: int | None = None
    peer: float | None = None
    sweep: Hashable = None

    def sample(self) -> Sample:
        """The run priced."""
        found = price(self.shape, self.configuration, self.cluster)
        allocated = max(found.allocated) if self.stage is None else found.allocated[self.stage]
        c = self.configuration
        work = 3.0 * forward_flops(self.shape) * c.global_batch * self.shape.sequence / c.devices
        return Sample(
            label=self.label, sweep=self.sweep, measured=self.measured, predicted=found.step, work=work, was_oom=False,
            told_oom=not found.fits, memory=self.memory, told_memory=allocated, peer=self.peer, arithmetic=found.arithmetic,
        )  # fmt: skip


def second_layer(one: Prepared) -> tuple[Priced, Priced]:
    """The prices of a model of one layer and of two."""
    first, second = (price(replace(one.shape, layers=n), one.configuration, one.cluster) for n in (1, 2))
    return first, second
