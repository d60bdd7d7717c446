"""`autopar models`: the types of models that work here, or what one configuration describes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from autopar.cli.command import Command
from autopar.cli.files import HUGGING_FACE
from autopar.cli.output import print_answer
from autopar.cli.shared_options import Parser, json_option


def add_options(parser: Parser) -> None:
    """Add the configuration to describe."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a config.json of Hugging Face, or its folder (default: list all types)",
    )
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """List the types, or describe a configuration without planning it."""
    from autopar.frontends.huggingface.types import described, types_by_task

    if args.config is None:
        tasks = types_by_task()
        print_answer(args, lambda: {"types": tasks}, lambda: _listed(tasks))
        return
    model = described(str(args.config).removeprefix(HUGGING_FACE), "bfloat16")
    print_answer(args, lambda: dataclasses.asdict(model), lambda: _told(model))


def _listed(tasks: dict[str, list[str]]) -> list[Any]:
    return [f"{task}: {', '.join(kinds)}" for task, kinds in tasks.items()]


def _told(model: Any) -> list[Any]:
    billions = model.parameters / 1e9
    active = f", {model.active / 1e9:.3f} for each token" if model.active < model.parameters else ""
    return [
        f"{model.kind}: {model.module} of transformers, {billions:.3f} billion parameters{active}",
        *(f"  {part}: {size / 1e9:.3f} billion" for part, size in model.parts.items()),
        *model.notes,
    ]


COMMAND = Command(
    name="models",
    summary="the types of models that work here, or what one configuration describes",
    add_options=add_options,
    run=run,
)
