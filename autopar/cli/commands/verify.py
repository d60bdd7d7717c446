"""`autopar verify`: execute a sharding that someone else wrote, and name what is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.command import Command
from autopar.cli.output import print_json, stdout_to_stderr
from autopar.cli.shared_options import Parser, json_option
from autopar.errors import RunError, UsageError
from autopar.printable import printable


def add_options(parser: Parser) -> None:
    """Add the case and its ranks."""
    add = parser.add_argument
    add(
        "case",
        metavar="CASE",
        help="package.module:function returning a dict of module, inputs, "
        "parallelize(module, mesh), and perhaps loss and mesh; "
        "with --tp-plan, returning (module, example_inputs)",
    )
    add(
        "--tp-plan",
        metavar="FILE",
        help="a tensor-parallel plan of Hugging Face transformers (JSON) to verify on the module",
    )
    add(
        "--nproc",
        type=int,
        metavar="N",
        help="number of forked ranks (default: those of the case's mesh, else 2)",
    )
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """Execute a sharding shard by shard against the whole; fail if they differ."""
    if args.nproc is not None and args.nproc < 2:
        raise UsageError(f"--nproc is {args.nproc}; a sharding is verified on 2 ranks or more")
    with stdout_to_stderr():
        from autopar.runtime.verifying import verify
        from autopar.runtime.verifying.verdict import verdict_json

        verdict = verify(_case(args))
    if args.json:
        print_json(verdict_json(verdict))
    else:
        mesh = " x ".join(map(str, verdict.mesh))
        sentences = [*(finding.sentence for finding in verdict.findings), *verdict.notes]
        print(
            printable(
                f"{verdict.name} on {mesh} ranks: {verdict.checked} operators on DTensors "
                f"and {verdict.gradients} gradients compared"
            )
        )
        print(printable("\n".join(f"  {sentence}" for sentence in sentences)))
    if not verdict.ok:
        raise RunError(
            "the sharding does not compute what the whole does: " + verdict.findings[0].sentence
        )


def _case(args: argparse.Namespace) -> Any:
    """The case to verify: a function's own, or a module under a tensor-parallel plan."""
    from autopar.frontends.load import call_function
    from autopar.runtime.verifying import case_named, styles_case

    if not args.tp_plan:
        return case_named(args.case, args.nproc)
    module, inputs = call_function(args.case)
    if isinstance(inputs, dict):
        arguments = tuple(inputs.values())
    elif isinstance(inputs, list | tuple):
        arguments = tuple(inputs)
    else:
        arguments = (inputs,)
    return styles_case(Path(args.tp_plan), args.case, module, arguments, args.nproc or 2)


COMMAND = Command(
    name="verify",
    summary="execute a sharding that someone else wrote, and name what is wrong",
    add_options=add_options,
    run=run,
)
