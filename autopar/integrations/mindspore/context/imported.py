"""The price of a batch that comes in parts (`full_batch=False`).

It is that of the gathers of each stage before a step.

They are added to the predicted step after the search, which does not weigh them. A plan that splits
the batch over all devices, as the data-parallel modes do, has none; for other plans they are equal
for all strategies of a mesh. Stages gather at the same time, so the slowest stage counts.
"""

from __future__ import annotations

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import Graph
from autopar.order.part_gathers import part_gathers
from autopar.plan import Plan
from autopar.plan_parts import CollectivePlan
from autopar.sharding.analysis import analyse


def with_parts_gathered(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """The plan with all-gathers for inputs that some stage reads in other parts than come in."""
    execution = plan.execution(analyse(graph, train=plan.model.mode == "train"))
    gathers: list[CollectivePlan] = []
    slowest = 0.0
    for stage in range(execution.stages):
        mesh = execution.chunks[stage].mesh
        before = len(gathers)
        prices = MeshPrices(cluster=cluster, mesh=mesh)
        for gather in part_gathers(execution, stage):
            seconds = prices.seconds("all_gather", (gather.axis,), gather.nbytes)
            axis = mesh.axes[gather.axis].name
            gathers.append(
                CollectivePlan(
                    phase="forward",
                    kind="all_gather",
                    axis=axis,
                    nbytes=gather.nbytes,
                    seconds=seconds,
                    tensor=gather.name,
                )
            )
        slowest = max(slowest, sum(c.seconds for c in gathers[before:]))
    if not gathers:
        return plan
    was = plan.predicted
    made = plan.provenance
    told = was.model_copy(
        update={"step": was.step + slowest, "communication": was.communication + slowest}
    )
    gap = None if made.gap is None or made.lower_bound <= 0 else told.step / made.lower_bound - 1
    return plan.model_copy(
        update={
            "collectives": (*gathers, *plan.collectives),
            "predicted": told,
            "provenance": made.model_copy(update={"gap": gap}),
        }
    )
