"""The command line `autopar`: parses arguments, calls the Python interface, prints; what is heavy is imported where it is used."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AutoparError, PlanError, RunError, UsageError, unknown
from .printable import printable
from .report.arguments import build_parser, pair_of, size_of, sizes_of
from .report.files import check_outputs

if TYPE_CHECKING:
    from autopar.costmodel import Cluster

    from .api import Planned
    from .ir import Graph
    from .model import LoadedModel
    from .plan import Plan
    from .report.explained import Explained

BROKEN_PIPE = 128 + 13
MOST_RANKS = 512
"""Ranks that `autopar run` starts on one machine: each is a process with torch in it."""


def main() -> None:
    """The entry point: one line on stderr and an exit code for whatever the user can cause."""
    # A plan is made of very many small objects that live to the end: collecting cycles among them only costs time.
    gc.set_threshold(200_000, 20, 100)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode is no reason to fail
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except AutoparError as error:
        print(f"autopar: error: {printable(str(error))}", file=sys.stderr)
        status = error.exit_code
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Run one command; raises the errors of `autopar.errors`. With --help or --version, `SystemExit(0)`."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
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
            _print_planned(args, planned, compare=args.compare and not interrupts.count)
        if args.trace:
            from .report.traces import write_trace

            write_trace(args.trace, planned.plan, planned.model.graph, planned.cluster)
    if interrupts.count:
        say_interrupted(args.output)
    return INTERRUPTED if interrupts.count else 0


def _print_planned(args: argparse.Namespace, planned: Planned, *, compare: bool) -> None:
    from .report.planned import planned_json, planned_parts
    from .report.tables import show

    memory = _memory(args)
    if args.json:
        _print_json(planned_json(planned, compare=compare, memory=memory, saved=args.output))
    else:
        show(planned_parts(planned, compare=compare, memory=memory, saved=args.output))


def _planned(args: argparse.Namespace, bar: Callable[[int, int, str], None]) -> Planned:
    from .api import plan_loaded

    _check_words(args, [args.scheme] if args.scheme else [])
    model = _load(args)
    mesh = sizes_of(args.mesh, "--mesh") if args.mesh else None
    return plan_loaded(
        model, devices=args.devices, cluster=args.cluster, mode=args.mode, master=args.master, reduce=args.reduce,
        optimizer=args.optimizer, search=args.search,
        memory=_memory(args), pins=args.pin, scheme=args.scheme, mesh=mesh, stages=args.stages,
        micro_batches=args.micro_batches, recompute=args.recompute, zero=args.zero, offload=args.offload, schedule=args.schedule,
        interleave=args.interleave, load=args.strategy_load, reuse_from=args.reuse,
        discover=args.discover, replicate_unknown=args.replicate_unknown, progress=bar,
    )  # fmt: skip


def _check_words(args: argparse.Namespace, schemes: Sequence[str]) -> None:
    """Tell what is wrong with the cluster, the memory, schemes and pins before the model is read."""
    from .api import choose_cluster
    from .pins import parse_pin
    from .schemes import scheme_named

    _memory(args)
    for name in schemes:
        scheme_named(name)
    for text in getattr(args, "pin", ()):
        parse_pin(text)
    if args.cluster or args.devices is not None:
        choose_cluster(args.cluster, args.devices)


def _compare(args: argparse.Namespace) -> None:
    from .report.compare import compared_json, compared_parts, rivals
    from .report.planned import cluster_sentence
    from .report.progress import ProgressBar
    from .report.tables import show
    from .schemes import SCHEMES

    _check_words(args, args.scheme)
    with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
        from .api import plan_loaded

        planned = plan_loaded(
            _load(args),
            devices=args.devices,
            cluster=args.cluster,
            mode=args.mode,
            master=args.master,
            reduce=args.reduce,
            optimizer=args.optimizer,
            memory=_memory(args),
            progress=bar,
        )
        found = rivals(planned, args.scheme or list(SCHEMES), memory=_memory(args), progress=bar)
    if args.json:
        _print_json(compared_json(planned, found))
    else:
        show(compared_parts(planned, found, cluster_sentence(planned)))


def _warn_replicated(plan: Plan) -> None:
    if plan.replicated:
        named = printable(", ".join(plan.replicated), lines=False)
        print(f"autopar: every device computes all of {named}: no rule says how to split it", file=sys.stderr)


def _load(args: argparse.Namespace) -> LoadedModel:
    """The model with the sizes asked for; where a plan is loaded and no size is given, those of the plan."""
    from .configured import PREFIX, SEQUENCE, load_any
    from .frontends.load import ModelOptions

    for name in ("batch", "devices"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if getattr(args, "strategy_load", None) and not (args.batch or args.dim or args.shape or args.dtype or args.frozen or args.trained):
        from .api import model_of_plan
        from .plan import Plan

        return model_of_plan(args.model, Plan.load(args.strategy_load), loss=args.loss, trust=args.trust)
    dims = {name: size_of(size, f"--dim {name}") for name, size in (pair_of(text, "--dim", "NAME=SIZE") for text in args.dim)}
    if args.seq is not None:
        if not args.model.startswith(PREFIX):
            raise UsageError(f"--seq applies to {PREFIX} models; other models take --dim NAME=SIZE, or the sizes of their example inputs")
        dims[SEQUENCE] = args.seq
    shapes = {name: sizes_of(size, f"--shape {name}") for name, size in (pair_of(text, "--shape", "INPUT=1x30") for text in args.shape)}
    options = ModelOptions(
        dims=dims, shapes=shapes, batch=args.batch, dtype=args.dtype, loss=args.loss, train=args.mode == "train",
        frozen=args.frozen, trained=args.trained, trust=args.trust,
    )  # fmt: skip
    return load_any(args.model, options)


def _memory(args: argparse.Namespace) -> float | None:
    from .report.units import parse_bytes

    return parse_bytes(args.memory, "--memory") if args.memory else None


# --- run ---


def _run(args: argparse.Namespace) -> None:
    from .plan import Plan

    for name in ("nproc", "steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    plan = Plan.load(args.plan)
    if args.nproc not in (None, plan.devices):
        remedy = f"give --nproc {plan.devices}, or plan again with --devices {args.nproc}"
        raise PlanError(f"the plan is for {plan.devices} ranks, not {args.nproc}: {remedy}")
    if plan.devices > MOST_RANKS and "RANK" not in os.environ:
        raise RunError(f"the plan is for {plan.devices} ranks; at most {MOST_RANKS} are started on one machine, more by torchrun")
    with contextlib.redirect_stdout(sys.stderr):
        from autopar.runtime.run import run_plan

        from .api import model_of_plan

        model = model_of_plan(args.model, plan, loss=args.loss, trust=args.trust)
        _warn_replicated(plan)
        report = run_plan(model, plan, steps=args.steps, check=args.check, backend=args.backend, seed=args.seed, weights=args.weights)
    from .report.fields import report_json, report_lines

    if args.json:
        _print_json(report_json(report))
    elif os.environ.get("RANK", "0") == "0":  # under torchrun, one rank speaks for all
        print(printable("\n".join(report_lines(report))))
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
    if args.json:
        _print_json(found.json())
    else:
        show(found.parts())


def _explained(plan: Plan, args: argparse.Namespace, bar: Callable[[int, int, str], None]) -> Explained:
    from .report.explained import Explained

    if args.model is None:
        return Explained.of_file(plan, args.operator)
    from .api import cluster_of_plan, model_of_batch, model_of_plan

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
        found = answered(found, cluster, bar, alternatives=args.alternatives, memory=_memory(args), batches=batches)
    return found


# --- report ---


def _report(args: argparse.Namespace) -> None:
    check_outputs(args, args.output)
    from .report.page.command import report

    report(args, _memory(args))
    print(printable(f"saved to {args.output}"), file=sys.stderr)


# --- convert ---


def _convert(args: argparse.Namespace) -> None:
    from .convert import convert
    from .outputs import write_whole
    from .plan import Plan

    check_outputs(args, args.output)
    found = convert(Plan.load(args.plan), args.to)
    for note in found.lost:
        print(printable(f"autopar: {args.to}: {note}"), file=sys.stderr)
    if args.output:
        write_whole(Path(args.output), found.text)
    else:
        print(printable(found.text), end="")


# --- discover ---


def _discover(args: argparse.Namespace) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        from autopar.runtime.discovery import discover_target, example_of_texts

        if args.inputs is None and not args.set:
            found = discover_target(args.target, (), {})
        else:
            found = discover_target(args.target, *example_of_texts(args.target, args.inputs, args.set))
    if args.json:
        _print_json(found.json())
    else:
        print(printable(found.line))
        print(f"# proven by executing {found.strategies} strategies on {', '.join('x'.join(map(str, mesh)) for mesh in found.meshes)}")
        print(printable("".join(f"# {note}\n" for note in found.notes)), end="")


# --- calibrate, bench ---


def _calibrate(args: argparse.Namespace) -> None:
    from autopar.costmodel import dump, load_cluster

    from .outputs import write_whole
    from .report.calibrated import calibrate, calibrated_parts
    from .report.clusters import show_parts
    from .report.tables import show

    path = Path(args.output)
    check_outputs(args, args.output)
    if path.suffix.lower() != ".json":
        raise UsageError(f"{path}: a cluster file ends in .json")
    _check_ranks(args)
    if not args.tolerance > 0:
        raise UsageError(f"--tolerance is {args.tolerance}; it must be above 0")
    inside = load_cluster(args.inside) if args.inside else None
    with contextlib.redirect_stdout(sys.stderr):
        found = calibrate(
            nproc=args.nproc, backend=args.backend, name=args.name or path.stem, kinds=_kinds(args), quick=args.quick,
            tolerance=args.tolerance, inside=inside,
        )  # fmt: skip
    if found is None:
        return
    write_whole(path, dump(found))
    if args.json:
        _print_json(json.loads(dump(found)))
    else:
        show([*show_parts(found), *calibrated_parts(found)])


def _bench(args: argparse.Namespace) -> None:
    from .outputs import write_whole
    from .report.bench import bench_collectives, bench_json, bench_panels, bench_parts
    from .report.plot import svg
    from .report.tables import show
    from .report.units import parse_bytes

    check_outputs(args, args.plot)
    _check_ranks(args)
    sizes = [int(parse_bytes(text, "--sizes")) for text in args.sizes.split(",")]
    with contextlib.redirect_stdout(sys.stderr):
        found = bench_collectives(nproc=args.nproc, backend=args.backend, sizes=sizes, kinds=_kinds(args), cluster=args.cluster)
    if found is None:
        return
    if args.plot:
        write_whole(Path(args.plot), svg(bench_panels(found)))
    if args.json:
        _print_json(bench_json(found))
    else:
        show(bench_parts(found))


def _kinds(args: argparse.Namespace) -> list[str]:
    return [kind for kind in args.collectives.split(",") if kind]


def _check_ranks(args: argparse.Namespace) -> None:
    if args.nproc is not None and args.nproc < 2:
        raise UsageError(f"--nproc is {args.nproc}; collectives are measured on 2 ranks or more")


# --- cluster ---


def _cluster(args: argparse.Namespace) -> None:
    (_cluster_list if args.cluster_command == "list" else _cluster_show)(args)


def _cluster_list(args: argparse.Namespace) -> None:
    from autopar.costmodel import load_cluster, presets

    from .report.clusters import list_json, list_table
    from .report.tables import show

    found: list[Cluster] = [load_cluster(name) for name in presets()]
    if args.json:
        _print_json(list_json(found))
    else:
        show([list_table(found)])


def _cluster_show(args: argparse.Namespace) -> None:
    from autopar.costmodel import dump

    from .api import choose_cluster
    from .report.clusters import show_parts
    from .report.tables import show

    cluster, _ = choose_cluster(args.name, args.devices)
    if args.json:
        _print_json(json.loads(dump(cluster)))
    else:
        show(show_parts(cluster))


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=1))


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "plan": _plan, "compare": _compare, "run": _run, "explain": _explain, "report": _report, "convert": _convert, "discover": _discover,
    "calibrate": _calibrate, "bench": _bench, "cluster": _cluster,
}  # fmt: skip


if __name__ == "__main__":
    main()
