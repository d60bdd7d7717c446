"""Writes the predicted timeline of a step as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

from autopar.analysis.program.timelines import timelines
from autopar.costmodel import Cluster
from autopar.costmodel.step.trace import chrome_trace
from autopar.ir import Graph
from autopar.outputs import write_whole
from autopar.plan import Plan
from autopar.sharding.analysis import analyse


def write_trace(path: str | Path, plan: Plan, graph: Graph, cluster: Cluster) -> None:
    """Play one step of the plan on `cluster`, and write its events.

    They are those of every stage, or of one rank without stages.
    """
    analysis = analyse(graph, train=plan.model.mode == "train")
    write_whole(Path(path), json.dumps(chrome_trace(timelines(plan, analysis, cluster))) + "\n")
