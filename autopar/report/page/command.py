"""`autopar report`: reads plans, and the model if given, and writes the report."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ...api import Planned
from ...errors import UsageError
from ...ir import Graph
from ...model import LoadedModel
from ...outputs import write_whole
from ...plan import Plan
from ...plan_origin import cluster_of_plan, known_cluster, model_of_batch, model_of_plan
from ...planning.ranking import Progress
from ...schemes import SCHEMES
from ...sharding.analysis import analyse
from ..compare import rivals
from ..curves import curves
from ..measured import read_measured
from ..progress import ProgressBar
from ..questions import sensitivity_of
from ..why import Why
from . import Contents, page
from .curves import sensitivity
from .modules import Tree
from .reasons import reasons, why_section
from .section import Section


def report(args: argparse.Namespace, memory: float | None) -> None:
    """Write the requested report."""
    for option in ("alternatives", "sensitivity"):
        if getattr(args, option) and args.model is None:
            raise UsageError(f"--{option} needs --model")
    plan = Plan.load(args.plan)
    other = Plan.load(args.plan2) if args.plan2 else None
    measured = read_measured(args.measured) if args.measured else None
    cluster = known_cluster(plan, args.cluster) if args.model is None else cluster_of_plan(plan, args.cluster)
    if args.model is None:
        contents = Contents.of(plan, other=other, cluster=cluster, measured=measured)
    else:
        assert cluster is not None
        with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
            model = model_of_plan(args.model, plan, trust=args.trust)
            planned = Planned(plan=plan, model=model, cluster=cluster, notes=())
            found = rivals(planned, list(SCHEMES), memory=memory, progress=bar) if args.compare else []
            contents = Contents.of(
                plan, other=other, graph=model.graph, cluster=cluster, rivals=found, measured=measured,
                more=lambda tree: _answers(tree, planned, args, memory, bar),
            )  # fmt: skip
    write_whole(Path(args.output), page(contents))


def _answers(tree: Tree, planned: Planned, args: argparse.Namespace, memory: float | None, bar: Progress) -> Sequence[Section]:
    """The sections that need further searches."""
    plan, cluster = planned.plan, planned.cluster
    analysis = analyse(planned.model.graph, train=plan.model.mode == "train")
    found = []
    if args.alternatives:
        why = Why(plan, analysis, cluster, memory=memory, play=False)
        found.append(why_section(plan, reasons(tree, why, bar)))
    if args.sensitivity:

        def rebatched(batch: int) -> Graph:
            model: LoadedModel = model_of_batch(args.model, plan, batch, trust=args.trust)
            return model.graph

        held = sensitivity_of(plan, analysis, cluster, memory=memory, batches=rebatched)
        found.append(sensitivity(curves(held, bar), plan.predicted.step))
    return found
