"""The parts of a plan's step, priced on any cluster.

The parts are the seconds of products, of other computation, and of collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costmodel import Cluster
from autopar.costmodel.device.device import FAMILIES
from autopar.costmodel.step.estimate import estimate, step_seconds, timeline
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.timeline import Overlap
from autopar.order.execution import execution
from autopar.order.scheduled import Scheduled
from autopar.plan import Plan
from autopar.sharding.analysis import Analysis
from autopar.sharding.micro_batches import split_batch
from autopar.sharding.program import Compute
from autopar.sharding.rules import RULES
from autopar.sharding.rules.experts import EXPERTS

from .account import executions
from .played_stages import stages_figures, stages_seconds

ARITHMETIC = ("products", "convolutions", "attention")
STREAMS = ("elementwise and others", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """A step of a plan; `whole`, `part`: the analyses of the batch and of a micro-batch.

    With stages the step is that of all stages together; `micro`: the program of the whole model on
    the mesh of one stage.
    """

    micro: Scheduled
    whole: Analysis
    part: Analysis
    plan: Plan

    def prices(self, cluster: Cluster) -> MeshPrices:
        """The prices of the mesh, or of a stage's mesh."""
        return MeshPrices(
            cluster=cluster, mesh=self.plan.mesh_, unit_bytes=self.plan.schedule.unit_bytes
        )

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of the step."""
        if self.plan.stages:
            return stages_seconds(self.plan, self.whole, cluster)
        return estimate(
            self.micro, self.part, self.prices(cluster), optimizer=self.plan.model.optimizer
        ).step

    @property
    def computing(self) -> list[tuple[Compute, int, int]]:
        """The operators of a step, each with how often it runs forward and backward."""
        pairs = zip(self.micro.program.steps, executions(self.micro), strict=True)
        warm = (
            (s, n)
            for s, n in pairs
            if isinstance(s, Compute) and s.operator.name not in self.part.cold
        )
        return [(step, times.forward + times.recomputed, times.backward) for step, times in warm]

    @property
    def families(self) -> Mapping[str, str]:
        """The families of types that products compute in, each with one of its types."""
        dtypes: dict[str, str] = {}
        for step, _, _ in self.computing:
            if _is_product(step):
                call = self.part.offers[step.operator.name].call
                cast = call.get("compute")
                floats = [tensor.dtype for tensor in call.outputs if tensor.is_float]
                dtype = cast if isinstance(cast, str) else next(iter(floats), "float32")
                dtypes.setdefault(FAMILIES[dtype], dtype)
        return dtypes

    def computed(self, cluster: Cluster) -> dict[tuple[str, ...], float]:
        """Seconds of computation in a step without communication.

        They are those of products, and those of all other operators with the update.
        """
        prices = self.prices(cluster)
        products = 0.0
        for step, forward, backward in self.computing:
            if _is_product(step):
                own = step_seconds(step, self.part, prices)
                products += forward * own.forward + backward * own.backward
        return {ARITHMETIC: products, STREAMS: max(0.0, self._all(cluster) - products)}

    def _all(self, cluster: Cluster) -> float:
        if self.plan.stages:
            figures = stages_figures(self.plan, self.whole, cluster)
            passes = float((figures.forward + figures.backward - figures.moved).sum())
            return self.plan.schedule.micro_batches * passes + float(figures.update.sum())
        # Computation is slower while something is sent; this is what it takes by itself.
        alone = timeline(
            self.micro,
            self.part,
            self.prices(cluster),
            optimizer=self.plan.model.optimizer,
            overlap=Overlap(slowdown=1.0),
        )
        return alone.forward + alone.backward + alone.update

    def collectives(self, cluster: Cluster) -> Counter[tuple[str, str]]:
        """Seconds of a step's collectives by kind and level."""
        prices = self.prices(cluster)
        sums = Counter[tuple[str, str]]()
        for one in self.micro.collectives():
            level = prices.place(one.axes)[1]
            sums[one.kind, level] += prices.collective(one)  # type: ignore[assignment]
        return sums


def stepping_of(plan: Plan, analysis: Analysis) -> Stepping:
    """The step of a plan of this model."""
    count = plan.schedule.micro_batches
    micro = (
        execution(plan.assignment(analysis), analysis, plan.schedule.in_stage).micro
        if plan.stages
        else plan.execution(analysis).micro
    )
    return Stepping(
        micro=micro,
        whole=analysis,
        part=split_batch(analysis, count) if count > 1 else analysis,
        plan=plan,
    )


def _is_product(step: Compute) -> bool:
    return step.operator.kind == EXPERTS or bool(RULES[step.operator.kind].products)
