"""`autopar checkpoint`: the checkpoints of a training."""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.cli.output import print_answer, print_json
from autopar.cli.shared_options import Parser, json_option
from autopar.options.values import DTYPES
from autopar.printable import printable


def add_show_options(parser: Parser) -> None:
    """Add the folder."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="where autopar.save has put it: the latest there is shown, or one that is named",
    )
    json_option(parser)


def add_convert_options(parser: Parser) -> None:
    """Add the folders, and what changes on the way."""
    add = parser.add_argument
    add(
        "folder",
        metavar="FOLDER",
        help="a checkpoint, or a folder of them (the latest); "
        "or a .safetensors file, or a folder of such",
    )
    add(
        "-o",
        "--output",
        required=True,
        metavar="NEW",
        help="the new folder: weights of the checkpoint, or a checkpoint of the weights",
    )
    add(
        "--name",
        metavar="STEP",
        help="the checkpoint of this name in FOLDER, such as step-00000200 (default: the latest)",
    )
    add("--dtype", choices=DTYPES, help="floating-point type in the new files (default: as it is)")
    add(
        "--strip",
        default="",
        metavar="PREFIX",
        help="what all names begin with, and are to be without",
    )
    add("--add", default="", metavar="PREFIX", help="what all names are to begin with")
    json_option(parser)


def show_checkpoint(args: argparse.Namespace) -> None:
    """Show a checkpoint's step, plan and sizes."""
    from autopar.report.checkpoints import checkpoint_json, checkpoint_parts, read_checkpoint

    path, manifest = read_checkpoint(args.folder)
    print_answer(
        args, lambda: checkpoint_json(path, manifest), lambda: checkpoint_parts(path, manifest)
    )


def convert_checkpoint(args: argparse.Namespace) -> None:
    """Write a checkpoint as weights, or weights as a checkpoint."""
    from autopar.report.checkpoints import converted

    conversion = converted(
        args.folder, args.output, name=args.name, dtype=args.dtype, strip=args.strip, add=args.add
    )
    if args.json:
        print_json(conversion.json())
    else:
        print(printable(conversion.sentence))


def run(args: argparse.Namespace) -> None:
    """Show a checkpoint, or convert it."""
    if args.checkpoint_command == "show":
        show_checkpoint(args)
    else:
        convert_checkpoint(args)


SHOW = Command(
    name="show",
    summary="show a checkpoint's step, plan, fingerprints and sizes",
    add_options=add_show_options,
    run=show_checkpoint,
)
CONVERT = Command(
    name="convert",
    summary="write a checkpoint as Hugging Face has weights, or such weights as a checkpoint",
    add_options=add_convert_options,
    run=convert_checkpoint,
)
COMMAND = Command(
    name="checkpoint", summary="the checkpoints of a training", run=run, children=(SHOW, CONVERT)
)
