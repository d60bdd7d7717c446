"""`autopar models`: the types of models that work here, or what one configuration describes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from autopar.cli.command import Command
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
    from autopar.frontends.huggingface import PREFIX

    if args.config is None:
        from autopar.frontends.huggingface.types import types_by_task

        tasks = types_by_task()
        print_answer(args, lambda: {"types": tasks}, lambda: _listed(tasks))
        return
    from autopar.analysis.described import described_model

    model = described_model(str(args.config).removeprefix(PREFIX))
    print_answer(args, lambda: dataclasses.asdict(model), lambda: _told(model))


def _listed(tasks: dict[str, list[str]]) -> list[Any]:
    return [f"{task}: {', '.join(kinds)}" for task, kinds in tasks.items()]


def _told(model: Any) -> list[Any]:
    from autopar.units import count_text

    active = f", {count_text(model.active)} for each token" * (model.active < model.parameters)
    parameters = f"{count_text(model.parameters)} parameters{active}"
    return [
        f"{model.kind}: {model.module} of {model.project}, {parameters}",
        *(f"  {part}: {count_text(size)}" for part, size in model.parts.items()),
        *model.notes,
    ]


COMMAND = Command(
    name="models",
    summary="the types of models that work here, or what one configuration describes",
    add_options=add_options,
    run=run,
)
