"""`autopar run`: run a plan on ranks of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.loading import warn_replicated
from autopar.cli.output import print_json, stdout_to_stderr
from autopar.cli.shared_options import (
    Parser,
    backend_option,
    json_option,
    plan_argument,
    planning_option,
)
from autopar.errors import PlanError, RunError, UsageError
from autopar.file_limits import RANKS
from autopar.printable import printable

if TYPE_CHECKING:
    from autopar.analysis.measurements.recalibration import Recalibrated
    from autopar.costmodel import Cluster
    from autopar.ir import Graph
    from autopar.plan import Plan

RUNNING = ("steps", "check", "backend", "seed", "weights", "profile")
"""The options that go to `run_plan`."""


def add_options(parser: Parser) -> None:
    """Add the plan, the model, and what is run, checked and measured."""
    add = parser.add_argument
    plan_argument(parser)
    add("--model", required=True, metavar="MODEL", help="the model that it was made for")
    planning_option(parser, "trust")
    add(
        "--nproc",
        type=int,
        metavar="N",
        help="number of ranks (default, and only choice: the plan's devices)",
    )
    planning_option(parser, "loss", help="the loss that was given to plan")
    add("--steps", type=int, default=1, metavar="K", help="training steps to run (default: 1)")
    add(
        "--check",
        action="store_true",
        help="compare outputs, gradients and updated weights with one device",
    )
    add(
        "--profile",
        metavar="FILE",
        help="measure steps after the first, and write their trace to FILE, "
        "those of other stages beside it",
    )
    add(
        "--recalibrate",
        metavar="FILE",
        help=(
            "with --profile: write the cluster with its figures scaled to what was measured (.json)"
        ),
    )
    planning_option(parser, "cluster", help="the cluster to recalibrate (default: the plan's)")
    backend_option(parser, strict=True)
    add(
        "--weights",
        metavar="FILE|FOLDER",
        help="safetensors files to read instead of the weights that a PyTorch model has",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of inputs and of absent weights (default: 0)",
    )
    planning_option(parser, "rules")
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """Run the plan, print the report, and fail if it does not compute what one device does."""
    from autopar.plan import Plan

    for name in ("nproc", "steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    _check_profile_options(args)
    plan = Plan.load(args.plan)
    cluster = _cluster_to_scale(args, plan)
    _check_ranks(args, plan)
    with stdout_to_stderr():
        from autopar.analysis.import_proofs import proof_of
        from autopar.plan_origin import model_of_plan
        from autopar.runtime.launch import launched_first
        from autopar.runtime.run import run_plan

        model = model_of_plan(args.model, plan, loss=args.loss, trust=args.trust)
        proof_of(model, runs=True)
        warn_replicated(plan)
        report = run_plan(model, plan, **{name: getattr(args, name) for name in RUNNING})
    # Under torchrun every rank comes here: one speaks for all.
    if args.json or launched_first():
        _print(args, report, _recalibration(args, plan, model.graph, cluster, report.profile))
    if not report.ok:
        raise RunError(f"the run does not agree with one device: {report.check}")


def _check_ranks(args: argparse.Namespace, plan: Plan) -> None:
    """Refuse a number of ranks that the plan is not for, or that one machine cannot start."""
    # Idle ranks of the plan are not started, so both counts are the plan's.
    if args.nproc not in (None, plan.devices, plan.devices + plan.unused):
        remedy = f"give --nproc {plan.devices}, or plan again with --devices {args.nproc}"
        raise PlanError(f"the plan is for {plan.devices} ranks, not {args.nproc}: {remedy}")
    if plan.devices <= RANKS:
        return
    from autopar.runtime.launch import launched

    if launched() is None:
        raise RunError(
            f"the plan is for {plan.devices} ranks; "
            f"at most {RANKS} are started on one machine, more by torchrun"
        )


def _check_profile_options(args: argparse.Namespace) -> None:
    """Refuse options of a profile that is impossible or cannot be written."""
    check_outputs(args, args.profile, args.recalibrate)
    if args.recalibrate and not args.profile:
        raise UsageError("--recalibrate scales a cluster to what --profile measures: give both")
    if args.recalibrate and Path(args.recalibrate).suffix.lower() != ".json":
        raise UsageError(f"{args.recalibrate}: a cluster file ends in .json")
    if args.cluster and not args.recalibrate:
        raise UsageError("--cluster says what to recalibrate: give --recalibrate FILE")
    if args.profile and (args.check or args.steps < 2):
        raise UsageError(
            "--profile measures the steps after the first: give --steps 2 or more, without --check"
        )


def _cluster_to_scale(args: argparse.Namespace, plan: Plan) -> Cluster | None:
    """The cluster that `--recalibrate` scales, if it is given.

    It is refused before the run if a profile cannot scale it.
    """
    if not args.recalibrate:
        return None
    from autopar.analysis.measurements.recalibration import require_alike
    from autopar.plan_origin import cluster_of_plan

    cluster = cluster_of_plan(plan, args.cluster)
    require_alike(plan, cluster)
    return cluster


def _recalibration(
    args: argparse.Namespace,
    plan: Plan,
    graph: Graph,
    cluster: Cluster | None,
    profile: Mapping[str, Any] | None,
) -> Callable[[], Recalibrated] | None:
    """The function that scales the cluster to the profile and writes its file, if wanted."""
    if cluster is None or profile is None:
        return None

    def scale() -> Recalibrated:
        from autopar.analysis.measurements.recalibration import recalibrate
        from autopar.runtime.launch import launched_first

        named = replace(cluster, name=Path(args.recalibrate).stem)
        scaled = recalibrate(profile, plan, graph, named)
        if launched_first():
            scaled.save(args.recalibrate)
        return scaled

    return scale


def _print(
    args: argparse.Namespace, report: Any, recalibrate: Callable[[], Recalibrated] | None
) -> None:
    """Print a `RunReport`, the profile in tables, and the result of `recalibrate`."""
    from autopar.report.measurements.profile import profile_parts
    from autopar.report.measurements.recalibration import recalibrated_json, recalibrated_parts
    from autopar.report.measurements.run_fields import report_json, report_lines
    from autopar.report.printing import show

    if args.json:
        fields = report_json(report)
        if fields.get("profile") is None:
            fields.pop("profile", None)
        if recalibrate:
            fields["recalibrated"] = recalibrated_json(recalibrate())
        print_json(fields)
        return
    lines = [line for line in report_lines(report) if not line.startswith("profile")]
    print(printable("\n".join(lines)))
    if report.profile is not None:
        show(profile_parts(report.profile))
    if recalibrate:
        show(recalibrated_parts(recalibrate()))


COMMAND = Command(
    name="run", summary="run a plan on ranks of this machine", add_options=add_options, run=run
)
