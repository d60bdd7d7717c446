"""`autopar bench collectives`: measure collectives by size, and compare with the model."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.output import print_answer, stdout_to_stderr
from autopar.cli.shared_options import (
    Parser,
    check_measured_ranks,
    json_option,
    measured_kinds,
    measuring_options,
    planning_option,
    planning_values,
)

METHODS = (
    "naive",
    "parameter_server",
    "binomial_tree",
    "hypercube",
    "halving",
    "ring",
    "torus",
    "chain",
    "two_tree",
    "in_switch",
    "pairwise",
    "bruck",
)
PRICED = "1KiB,1MiB,1GiB"
SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


def add_options(parser: Parser) -> None:
    """Add the ranks, and what is measured."""
    add = parser.add_argument
    measuring_options(parser)
    add(
        "--sizes",
        metavar="1KiB,1MiB",
        help="bytes (default: 1 KiB to 64 MiB; of methods 1 KiB, 1 MiB and 1 GiB)",
    )
    add(
        "--method",
        metavar="NAME,...",
        help="measure nothing: price these methods on --cluster beside what its backend takes "
        f"({', '.join(METHODS)}, all)",
    )
    planning_option(parser, "devices", help="devices of a priced --method (default: a node's)")
    add(
        "--collectives",
        default="",
        metavar="all_reduce,...",
        help="which collectives (default: all)",
    )
    planning_option(
        parser,
        "cluster",
        help="whose prediction to compare with (default: local-cpu for gloo, dgx-h100 for nccl)",
    )
    add("--plot", metavar="FILE", help="write bus bandwidth over bytes to FILE (.svg)")
    json_option(parser)


def run(args: argparse.Namespace) -> int | None:
    """Measure collectives, and compare with the predictions."""
    from autopar.analysis.measurements.collective_bench import bench_collectives
    from autopar.outputs import write_whole
    from autopar.report.measurements.bench import bench_json, bench_panels, bench_parts
    from autopar.report.plot import svg
    from autopar.runtime.launch.own_command import relaunched
    from autopar.units import parse_bytes

    check_outputs(args, args.plot)
    wanted = args.sizes or (PRICED if args.method else SIZES)
    sizes = [int(parse_bytes(text, "--sizes")) for text in wanted.split(",")]
    if args.method:
        _print_methods(args, sizes)
        return None
    check_measured_ranks(args)
    if (ranks := relaunched(args.nproc, args.backend, least=2)) is not None:
        return ranks.code
    with stdout_to_stderr():
        bench = bench_collectives(
            nproc=args.nproc,
            backend=args.backend,
            sizes=sizes,
            kinds=measured_kinds(args),
            cluster=args.cluster,
        )
    if bench is None:  # another rank speaks
        return None
    if args.plot:
        write_whole(Path(args.plot), svg(bench_panels(bench)))
    print_answer(args, lambda: bench_json(bench), lambda: bench_parts(bench))
    return None


def _print_methods(args: argparse.Namespace, sizes: list[int]) -> None:
    """Price methods of collectives on a cluster."""
    from autopar.analysis.measurements.collective_methods import method_rows
    from autopar.costmodel import load_cluster
    from autopar.errors import UsageError
    from autopar.report.measurements.bench import methods_json, methods_parts

    if args.plot:
        raise UsageError("--plot shows what was measured: give no --method")
    cluster = load_cluster(args.cluster or "dgx-h100")
    (devices,) = planning_values(args, ["devices"]).values()
    cluster = cluster.sized(devices or cluster.levels[0].size)
    rows = method_rows(cluster, args.method.split(","), measured_kinds(args), sizes)
    print_answer(args, lambda: methods_json(rows, cluster), lambda: methods_parts(rows, cluster))


COLLECTIVES = Command(
    name="collectives",
    summary="measure collectives by size, and compare with the model",
    add_options=add_options,
    run=run,
)
COMMAND = Command(
    name="bench",
    summary="measurements beside the model's predictions",
    run=run,
    children=(COLLECTIVES,),
)
