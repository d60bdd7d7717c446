"""`autopar discover`: find an operator's sharding rule by executing it."""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.cli.output import print_json, stdout_to_stderr
from autopar.cli.shared_options import Parser, json_option, planning_option
from autopar.printable import printable


def add_options(parser: Parser) -> None:
    """Add the operator and its example inputs."""
    add = parser.add_argument
    add(
        "target",
        metavar="OPERATOR",
        help="namespace.name.overload, or package.module:function, which returns "
        "(operator or function, example inputs[, keyword "
        "arguments]), or is the function beside FUNCTION_inputs",
    )
    add(
        "--inputs",
        metavar="6x4,int64:6",
        help="shapes of random example inputs, in the order of the operator's arguments",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the operator, as JSON; repeatable",
    )
    planning_option(parser, "rules")
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """Find the rule, and print it with its proof."""
    with stdout_to_stderr():
        from autopar.runtime.discovery import discover_target, example_of_texts

        if args.inputs is None and not args.set:
            rule = discover_target(args.target, (), {})
        else:
            example = example_of_texts(args.target, args.inputs, args.set)
            rule = discover_target(args.target, *example)
    if args.json:
        print_json(rule.json())
        return
    meshes = ", ".join("x".join(map(str, mesh)) for mesh in rule.meshes)
    print(printable(rule.line))
    print(f"# proven by executing {rule.strategies} strategies on {meshes}")
    print(printable("".join(f"# {note}\n" for note in rule.notes)), end="")


COMMAND = Command(
    name="discover",
    summary="find an operator's sharding rule by executing it, and prove it",
    add_options=add_options,
    run=run,
)
