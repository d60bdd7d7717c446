"""`autopar import`: plan as a configuration of another project says, beside the plan found."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.loading import check_words, load_asked
from autopar.cli.output import print_answer, print_notes, stdout_to_stderr
from autopar.cli.shared_options import (
    FORMATS,
    MODELS,
    Parser,
    json_option,
    planning_option,
    planning_options,
    planning_values,
)
from autopar.errors import UsageError
from autopar.options.table import CLUSTER, MODEL

if TYPE_CHECKING:
    from autopar.integrations.importing import Configuration
    from autopar.model import LoadedModel


def add_options(parser: Parser) -> None:
    """Add the configuration, the model, and the cluster."""
    add = parser.add_argument
    add(
        "config",
        metavar="CONFIG",
        help="torchtitan's .toml or config_registry.py, Megatron's arguments, Megatron-Bridge's "
        "recipe as .py, DeepSpeed's .json, accelerate's .yaml, or a tp_plan as .json",
    )
    add("--model", required=True, metavar="MODEL", help=MODELS)
    add(
        "--from",
        dest="form",
        choices=FORMATS,
        help="the project that CONFIG belongs to (default: as it looks)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value that CONFIG leaves to its caller: of a script's variable, of its argument by "
        "number, of a word in a template, or config, the function of a file of Python; may be "
        "repeated",
    )
    add("-o", "--output", metavar="FILE", help="write the configuration's plan to FILE")
    planning_options(parser, (*CLUSTER, *MODEL))
    add(
        "--no-compare",
        dest="compare",
        action="store_false",
        help="do not search for the best plan beside it",
    )
    planning_option(parser, "rules")
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """Plan according to a configuration, and freely, for comparison."""
    from autopar.cli.progress import ProgressBar
    from autopar.integrations.importing import Hardware, import_configuration, read_configuration
    from autopar.report.imported import imported_json, imported_parts

    check_outputs(args, args.output)
    configuration = read_configuration(args.config, args.form, _values(args.set))
    with stdout_to_stderr(), ProgressBar() as bar:
        imported = import_configuration(
            configuration,
            _sized_model(args, configuration),
            Hardware(**planning_values(args, ("devices", "cluster", "target", "memory"))),
            sizes=_sizes(args.model),
            compare=args.compare,
            progress=bar,
        )
    if args.output:
        imported.planned.plan.save(args.output)
    print_notes(configuration.source, configuration.lost)
    print_answer(
        args, lambda: imported_json(imported), lambda: imported_parts(imported, args.output)
    )


def _values(settings: list[str]) -> dict[str, str]:
    """The values of `--set`, by name."""
    pairs = [setting.partition("=") for setting in settings]
    wrong = [setting for setting, pair in zip(settings, pairs, strict=True) if not all(pair[:2])]
    if wrong:
        raise UsageError(f"--set {wrong[0]}: give NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _sized_model(args: argparse.Namespace, configuration: Configuration) -> LoadedModel:
    """The model with the configuration's sizes and type, unless the command line gives others."""
    from autopar.frontends.huggingface import PREFIX

    check_words(args, [])
    if args.batch is None:
        args.batch = configuration.global_batch(args.devices)
    if args.seq is None and args.model.startswith(PREFIX):
        args.seq = configuration.sequence
    if args.dtype is None:
        args.dtype = configuration.dtype
    if args.precision is None:
        args.precision = configuration.precision
    return load_asked(args)


def _sizes(model: str) -> dict[str, int] | None:
    """The sizes of a model that a configuration names."""
    from autopar.frontends.huggingface import PREFIX
    from autopar.integrations.importing.sizes import sizes_of_model

    if not model.startswith(PREFIX):
        return None
    path = Path(model.removeprefix(PREFIX))
    return sizes_of_model(path / "config.json" if path.is_dir() else path)


COMMAND = Command(
    name="import",
    summary="plan as a configuration of another project says, beside the plan found",
    add_options=add_options,
    run=run,
)
