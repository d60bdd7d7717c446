"""`autopar report`: reads plans, and the model where it is given, and writes the report."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from autopar.costmodel import Cluster

from ...api import Planned
from ...errors import UsageError
from ...ir import Graph
from ...of_plan import cluster_of_plan, model_of_plan
from ...outputs import write_whole
from ...plan import Plan
from ...schemes import SCHEMES
from ..compare import possible, rivals
from ..progress import ProgressBar
from ..tables import Rival
from . import Contents, page


def report(args: argparse.Namespace, memory: float | None) -> None:
    """Write the report that the arguments ask for."""
    plan = Plan.load(args.plan)
    other = Plan.load(args.plan2) if args.plan2 else None
    graph: Graph | None = None
    found: list[Rival] = []
    cluster = _cluster(plan, args.cluster, needed=args.model is not None)
    if args.model is not None:
        assert cluster is not None
        with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
            model = model_of_plan(args.model, plan, trust=args.trust)
            graph = model.graph
            if args.compare:
                planned = Planned(plan=plan, model=model, cluster=cluster, notes=())
                found = possible(rivals(planned, list(SCHEMES), memory=memory, progress=bar))
    contents = Contents.of(plan, other=other, graph=graph, cluster=cluster, rivals=found)
    write_whole(Path(args.output), page(contents))


def _cluster(plan: Plan, given: str | None, *, needed: bool) -> Cluster | None:
    """The plan's cluster; where it is no preset, none, unless the model's panels need it."""
    try:
        return cluster_of_plan(plan, given)
    except UsageError:
        if given is not None or needed:
            raise
        return None
