"""`autopar cluster`: the clusters that autopar knows."""

from __future__ import annotations

import argparse
import json

from autopar.cli.command import Command
from autopar.cli.output import print_answer
from autopar.cli.shared_options import Parser, json_option


def add_show_options(parser: Parser) -> None:
    """Add the cluster to show."""
    parser.add_argument("name", metavar="NAME", help="a preset or a .json, .yaml file")
    parser.add_argument("--devices", type=int, metavar="N", help="size it to N devices")
    json_option(parser)


def list_presets(args: argparse.Namespace) -> None:
    """List the presets."""
    from autopar.costmodel import load_cluster, presets
    from autopar.report.clusters import list_json, list_table

    clusters = [load_cluster(name) for name in presets()]
    print_answer(args, lambda: list_json(clusters), lambda: [list_table(clusters)])


def show_cluster(args: argparse.Namespace) -> None:
    """Show a preset or a cluster file."""
    from autopar.costmodel import dump
    from autopar.options.plan_options import choose_cluster
    from autopar.report.clusters import show_parts

    cluster, _ = choose_cluster(args.name, args.devices)
    print_answer(args, lambda: json.loads(dump(cluster)), lambda: show_parts(cluster))


def run(args: argparse.Namespace) -> None:
    """List the presets, or show a cluster."""
    if args.cluster_command == "list":
        list_presets(args)
    else:
        show_cluster(args)


LIST = Command(name="list", summary="list the presets", add_options=json_option, run=list_presets)
SHOW = Command(
    name="show",
    summary="show a preset or a cluster file",
    add_options=add_show_options,
    run=show_cluster,
)
COMMAND = Command(
    name="cluster", summary="the clusters that autopar knows", run=run, children=(LIST, SHOW)
)
