"""The price of a batch that comes in parts (`full_batch=False`): gathers of each stage before a step.

They are added to the predicted step after the search, which does not weigh them. A plan that splits the batch over all
devices, as the data-parallel modes do, has none; for other plans they are equal for all strategies of a mesh. Stages
gather at the same time, so the slowest stage counts.
"""

from __future__ import annotations

from ..costmodel.cluster.model import Cluster
from ..costmodel.step.pricing import MeshPrices
from ..ir import Graph
from ..order.part_gathers import part_gathers
from ..plan import Plan
from ..plan_parts import CollectivePlan
from ..sharding.analysis import analyse


def with_parts_gathered(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """The plan with all-gathers for the inputs that some stage reads in other parts than the ones that come."""
    execution = plan.execution(analyse(graph, train=plan.model.mode == "train"))
    found: list[CollectivePlan] = []
    slowest = 0.0
    for stage in range(execution.stages):
        mesh, before = execution.chunks[stage].mesh, len(found)
        prices = MeshPrices(cluster=cluster, mesh=mesh)
        for gather in part_gathers(execution, stage):
            seconds = prices.seconds("all_gather", (gather.axis,), gather.nbytes)
            axis = mesh.axes[gather.axis].name
            found.append(
                CollectivePlan(phase="forward", kind="all_gather", axis=axis, nbytes=gather.nbytes, seconds=seconds, tensor=gather.name)
            )
        slowest = max(slowest, sum(c.seconds for c in found[before:]))
    if not found:
        return plan
    was, made = plan.predicted, plan.provenance
    told = was.model_copy(update={"step": was.step + slowest, "communication": was.communication + slowest})
    gap = None if made.gap is None or made.lower_bound <= 0 else told.step / made.lower_bound - 1
    return plan.model_copy(
        update={"collectives": (*found, *plan.collectives), "predicted": told, "provenance": made.model_copy(update={"gap": gap})}
    )
