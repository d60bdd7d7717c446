"""A published run ready to be priced, whatever its file, and the sample of its price."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.costmodel.calibration.run_kinds import run_kind
from autopar.costmodel.device.device import TF32
from benchmarks.validating.known import Shape

from .configuration import Configuration
from .priced import Priced, price
from .scores import Sample
from .sizes import forward_flops

MANY = 16
"""Micro-batches of a step of which single layers are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run and its measurements.

    `measured`: seconds. `memory`: bytes that torch allocated at the peak, on the stage with index
    `stage` (None: the fullest); `occupied`: memory of the whole device, with the context.
    `deterministic`: kernels whose sums have one order. `peer`: seconds that the source's own model
    predicts. `open`: a fact that is not stated.
    `framework`: its name.
    """

    label: str
    shape: Shape
    configuration: Configuration
    cluster: Cluster
    measured: float | None
    memory: float | None = None
    stage: int | None = None
    peer: float | None = None
    sweep: Hashable = None
    framework: str = ""
    occupied: bool = False
    open: str = ""
    deterministic: bool = False

    def priced(self, cluster: Cluster | None = None) -> Priced:
        """The price of the run, on its own cluster or another one."""
        return price(self.shape, self.configuration, cluster or self.cluster, self.framework)

    def sample(self) -> Sample:
        """The run priced."""
        priced = self.priced()
        told = max(priced.allocated) if self.stage is None else priced.allocated[self.stage]
        work = (
            3.0
            * forward_flops(self.shape)
            * self.configuration.global_batch
            * self.shape.sequence
            / self.configuration.devices
        )
        return Sample(
            label=self.label,
            sweep=self.sweep,
            measured=self.measured,
            predicted=priced.step,
            work=work,
            was_oom=False,
            told_oom=not priced.fits,
            memory=self.memory,
            told_memory=priced.memory if self.occupied else told,
            peer=self.peer,
            open=(self.open,) if self.open else (),
            kind=self.kind,
        )

    @property
    def kind(self) -> str:
        """The kind of the run, of `RUN_KINDS`."""
        return run_kind(
            experts=self.shape.experts > 0,
            narrow=self.configuration.kernels.products not in ("", TF32),
            unmeasured=self.shape.state is not None
            or self.configuration.dtype == "float32"
            or self.deterministic,
        )


def further_layer(one: Prepared) -> tuple[Priced, Priced]:
    """The prices of a model of three layers, the fewest that recompute sees, and of four.

    They have so many micro-batches that what is done once a step does not matter.
    """
    c = one.configuration
    c = replace(c, global_batch=MANY * c.global_batch)
    first, second = (
        replace(one, shape=replace(one.shape, layers=n), configuration=c).priced() for n in (3, 4)
    )
    return first, second
