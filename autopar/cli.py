"""The command line `autopar`: parses arguments, calls the Python interface, prints; heavy modules load where used."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import AutoparError, PlanError, RunError, UsageError, unknown
from .limits import RANKS
from .printable import printable
from .report import asking, commands, comparing
from .report.arguments import build_parser, options_of
from .report.commands import memory_of, print_json
from .report.defaults import with_defaults
from .report.files import check_outputs
from .report.loading import check_words, load_asked
from .report.options import sizes_of

if TYPE_CHECKING:

    from .api import Planned
    from .ir import Graph
    from .plan import Plan
    from .report.explained import Explained

BROKEN_PIPE = 128 + 13
VERBOSE = "--verbose"
"""An option of every command: errors come with their traceback."""


def main() -> None:
    """The entry point: one line on stderr and an exit code for whatever the user can cause."""
    # A plan is made of very many small objects that live to the end: collecting cycles among them only costs time.
    gc.set_threshold(200_000, 20, 100)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode is no reason to fail
    argv, verbose = [word for word in sys.argv[1:] if word != VERBOSE], VERBOSE in sys.argv[1:]
    try:
        status = run(argv)
        sys.stdout.flush()
    except AutoparError as error:
        if verbose:
            traceback.print_exception(error)
        print(f"autopar: error: {printable(str(error))}", file=sys.stderr)
        status = error.exit_code
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    gc.freeze()  # what is left goes with the process: nobody has to look through it for cycles
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Run one command; raises the errors of `autopar.errors`. With --help or --version, `SystemExit(0)`."""
    parser = build_parser()
    args, rest = parser.parse_known_args(with_defaults(argv, options_of(parser)))
    if rest:
        names = [name for action in args.parser._actions for name in action.option_strings if name.startswith("--")]
        stray = rest[0].partition("=")[0]
        unexpected = f"unexpected argument {stray!r} (see {args.parser.prog} --help)"
        raise UsageError(unknown("option", stray, names) if stray.startswith("-") else unexpected)
    try:
        if getattr(args, "rules", None):
            _import_rules(args.rules)
        return COMMANDS[args.command](args) or 0
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError("this needs PyTorch, which is not installed: pip install 'autopar[torch]'") from error


def _import_rules(modules: Sequence[str]) -> None:
    from .operators import import_rules

    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print
        import_rules(modules)


# --- plan ---


def _plan(args: argparse.Namespace) -> int:
    """Plan, write, print; the status is that of an interrupt where one ended the search."""
    from .report.interrupts import INTERRUPTED, counted, say_interrupted
    from .report.progress import ProgressBar

    check_outputs(args, args.output, args.trace)
    with counted() as interrupts:
        with contextlib.redirect_stdout(sys.stderr), ProgressBar(wanted=not args.quiet) as bar:  # a user's module may print
            planned = _planned(args, bar)
            if not args.quiet:
                _warn_replicated(planned.plan)
        if args.output:
            planned.plan.save(args.output)
        if not (args.quiet and not args.json):
            _print_planned(args, planned, compare=False if interrupts.count else args.compare)
        if args.trace:
            from .report.traces import write_trace

            write_trace(args.trace, planned.plan, planned.model.graph, planned.cluster)
    if interrupts.count:
        say_interrupted(args.output)
    return INTERRUPTED if interrupts.count else 0


def _print_planned(args: argparse.Namespace, planned: Planned, *, compare: bool | None) -> None:
    from .report.plan_output import planned_json, planned_parts
    from .report.tables import show

    memory = memory_of(args)
    if args.json:
        print_json(planned_json(planned, compare=compare, memory=memory, saved=args.output))
    else:
        show(planned_parts(planned, compare=compare, memory=memory, saved=args.output))


def _planned(args: argparse.Namespace, bar: Callable[[int, int, str], None]) -> Planned:
    from .api import plan_loaded

    check_words(args, [args.scheme] if args.scheme else [])
    model = load_asked(args)
    mesh = sizes_of(args.mesh, "--mesh") if args.mesh else None
    return plan_loaded(
        model, devices=args.devices, cluster=args.cluster, mode=args.mode, master=args.master, reduce=args.reduce,
        optimizer=args.optimizer, search=args.search,
        memory=memory_of(args), pins=args.pin, scheme=args.scheme, mesh=mesh, stages=args.stages,
        micro_batches=args.micro_batches, recompute=args.recompute, zero=args.zero, offload=args.offload, schedule=args.schedule,
        interleave=args.interleave, load=args.strategy_load, reuse_from=args.reuse,
        discover=args.discover, replicate_unknown=args.replicate_unknown, progress=bar,
    )  # fmt: skip


def _warn_replicated(plan: Plan) -> None:
    if plan.replicated:
        named = printable(", ".join(plan.replicated), lines=False)
        print(f"autopar: every device computes all of {named}: no rule says how to split it", file=sys.stderr)


# --- run ---


def _run(args: argparse.Namespace) -> None:
    from .configured import require_weights
    from .plan import Plan
    from .report.ran import cluster_to_scale, print_run, require_profile, scaling

    for name in ("nproc", "steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    require_profile(args)
    require_weights(args.model)
    plan = Plan.load(args.plan)
    cluster = cluster_to_scale(args, plan)
    if args.nproc not in (None, plan.devices, plan.devices + plan.unused):  # idle ranks of the plan are not started
        remedy = f"give --nproc {plan.devices}, or plan again with --devices {args.nproc}"
        raise PlanError(f"the plan is for {plan.devices} ranks, not {args.nproc}: {remedy}")
    if plan.devices > RANKS and "RANK" not in os.environ:
        raise RunError(f"the plan is for {plan.devices} ranks; at most {RANKS} are started on one machine, more by torchrun")
    with contextlib.redirect_stdout(sys.stderr):
        from autopar.runtime.run import run_plan

        from .plan_origin import model_of_plan

        model = model_of_plan(args.model, plan, loss=args.loss, trust=args.trust)
        _warn_replicated(plan)
        chosen = {name: getattr(args, name) for name in ("steps", "check", "backend", "seed", "weights", "profile")}
        report = run_plan(model, plan, **chosen)
    if args.json or os.environ.get("RANK", "0") == "0":  # under torchrun, one rank speaks for all
        print_run(report, as_json=args.json, recalibrate=scaling(args, plan, model.graph, cluster, report.profile))
    if not report.ok:
        raise RunError(f"the run does not agree with one device: {report.check}")


# --- explain ---


def _explain(args: argparse.Namespace) -> None:
    from .plan import Plan
    from .report.progress import ProgressBar
    from .report.tables import show

    plan = Plan.load(args.plan)
    for option in ("alternatives", "sensitivity", "trace"):
        if getattr(args, option) and args.model is None:
            raise UsageError(f"--{option} needs --model")
    check_outputs(args, args.trace)
    with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
        found = _explained(plan, args, bar)
    found = found.with_collectives() if args.collectives else found
    found = found.beside_plan(Plan.load(args.diff)) if args.diff else found
    if args.json:
        print_json(found.json())
    else:
        show(found.parts())


def _explained(plan: Plan, args: argparse.Namespace, bar: Callable[[int, int, str], None]) -> Explained:
    from .plan_origin import cluster_of_plan, known_cluster, model_of_batch, model_of_plan
    from .report.explained import Explained

    if args.model is None:
        return replace(Explained.of_file(plan, args.operator), cluster=known_cluster(plan, args.cluster))

    model = model_of_plan(args.model, plan, trust=args.trust)
    cluster = cluster_of_plan(plan, args.cluster)
    if args.trace:
        from .report.traces import write_trace

        write_trace(args.trace, plan, model.graph, cluster)
    found = Explained.of_model(plan, model.graph, cluster, args.operator)
    if args.alternatives or args.sensitivity:
        from .report.questions import answered

        def rebatched(batch: int) -> Graph:
            return model_of_batch(args.model, plan, batch, trust=args.trust).graph

        batches = rebatched if args.sensitivity else None
        found = answered(found, cluster, bar, alternatives=args.alternatives, memory=memory_of(args), batches=batches)
    return found


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "plan": _plan, "compare": comparing.compare, "run": _run, "train": commands.train, "explain": _explain, "report": commands.report,
    "convert": commands.convert, "import": asking.import_, "what-if": asking.what_if, "verify": asking.verify,
    "discover": commands.discover, "calibrate": commands.calibrate, "doctor": commands.doctor, "bench": commands.bench,
    "cluster": commands.cluster, "checkpoint": commands.checkpoint,
    "completion": commands.completion,
}  # fmt: skip


if __name__ == "__main__":
    main()
