"""Writes the predicted timeline of a plan's step as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

from autopar.costmodel import Cluster
from autopar.costmodel.estimate import timeline
from autopar.costmodel.pricing import MeshPrices
from autopar.costmodel.trace import chrome_trace

from ..ir import Graph
from ..plan import Plan, write_whole
from ..sharding.analysis import analyse
from ..sharding.micro_batches import split_batch


def write_trace(path: str | Path, plan: Plan, graph: Graph, cluster: Cluster) -> None:
    """Play one step of the plan on `cluster` and write what one rank, which is like every other, does when."""
    analysis = analyse(graph, train=plan.model.mode == "train")
    prices = MeshPrices(cluster=cluster, mesh=plan.mesh_)
    schedule = plan.schedule.in_stage
    program = plan.execution(analysis).micro.program
    part = split_batch(analysis, schedule.micro_batches) if schedule.micro_batches > 1 else analysis
    found = timeline(program, part, prices, optimizer=plan.model.optimizer, schedule=schedule)
    role = f"each of {plan.devices} ranks" if plan.devices > 1 else "the only rank"
    write_whole(Path(path), json.dumps(chrome_trace({role: found.events})) + "\n")
