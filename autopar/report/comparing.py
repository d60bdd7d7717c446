"""`autopar compare`: the known schemes next to the plan found, or the model's scaling over clusters and devices."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .commands import memory_of, print_json
from .files import check_outputs
from .loading import check_words, load_asked
from .options import pair_of

if TYPE_CHECKING:
    from ..model import LoadedModel


def compare(args: argparse.Namespace) -> None:
    """Compare schemes on one cluster and number of devices, or scaling over several."""
    from .scaling import counts_of

    check_outputs(args, args.plot)
    clusters: list[str] = args.cluster
    counts = counts_of(args.devices) if args.devices is not None else ()
    scales = len(clusters) > 1 or len(counts) > 1 or args.price or args.plot or args.target_step or args.target_per_money
    if scales and args.scheme:
        raise UsageError("--scheme is for one cluster and one number of devices")
    if scales and not (clusters and counts):
        raise UsageError("give --cluster and --devices: which clusters, and how many devices of each (1..64)")
    args.cluster, args.devices = (clusters[0] if clusters else None), (counts[0] if counts else None)
    check_words(args, args.scheme)
    if scales:
        _scale(args, clusters, counts)
    else:
        _schemes(args)


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """The planner's arguments of both comparisons."""
    names = ("mode", "master", "reduce", "optimizer")
    return {**{name: getattr(args, name) for name in names}, "memory": memory_of(args)}


def _schemes(args: argparse.Namespace) -> None:
    from ..schemes import SCHEMES
    from .compare import compared_json, compared_parts, rivals
    from .plan_output import cluster_sentence
    from .progress import ProgressBar
    from .tables import show

    with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
        from ..api import plan_loaded

        planned = plan_loaded(load_asked(args), devices=args.devices, cluster=args.cluster, progress=bar, **_asked(args))
        found = rivals(planned, args.scheme or list(SCHEMES), memory=memory_of(args), progress=bar)
    if args.json:
        print_json(compared_json(planned, found))
    else:
        show(compared_parts(planned, found, cluster_sentence(planned), named=bool(args.scheme)))


def _scale(args: argparse.Namespace, clusters: list[str], counts: tuple[int, ...]) -> None:
    from ..outputs import write_whole
    from .progress import ProgressBar
    from .scaling import answers, prices_of, scaling, scaling_json, scaling_plot, scaling_table, target_seconds
    from .tables import show

    prices = prices_of(dict(pair_of(text, "--price", "CLUSTER=2.5") for text in args.price), clusters)
    step = target_seconds(args.target_step) if args.target_step else None
    if args.target_per_money is not None and not prices:
        raise UsageError("--target-per-money needs --price")
    with contextlib.redirect_stdout(sys.stderr), ProgressBar() as bar:
        model: LoadedModel = load_asked(args)
        rows = scaling(model, clusters, counts, prices, progress=bar, **_asked(args))
    said = answers(rows, step, args.target_per_money)
    if args.plot:
        write_whole(Path(args.plot), scaling_plot(rows))
    if args.json:
        print_json(scaling_json(rows, said))
    else:
        show([*said, scaling_table(rows), *([f"\nplot saved to {args.plot}"] if args.plot else [])])
