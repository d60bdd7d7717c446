"""The options of the commands about training and its machine: `train`, `checkpoint` and `doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="a .toml file with model, data, optimizer, schedule and training (docs/training.md)")
    add("--ranks", type=int, metavar="N", help="ranks of this machine (default: that of CONFIG, else 1); under torchrun, its ranks")
    add("--steps", type=int, metavar="N", help="train up to this step (default: that of CONFIG)")
    add("--folder", metavar="FOLDER", help="where checkpoints, plans and metrics go (default: that of CONFIG)")


def doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="ranks (default: one for each GPU, else 2 on the CPU); under torchrun, its ranks")
    add("--quick", action="store_true", help="one step of each plan, and one collective")
    _json_option(parser)


def show_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `checkpoint show`."""
    parser.add_argument("folder", metavar="FOLDER", help="where autopar.save has put it: the latest there is shown, or one that is named")
    _json_option(parser)


def convert_options(parser: argparse.ArgumentParser, dtypes: Sequence[str]) -> None:
    """Add the options of `checkpoint convert`."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="a checkpoint, or a folder of them (the latest); or a .safetensors file, or a folder of such")
    add("-o", "--output", required=True, metavar="NEW", help="the new folder: weights of the checkpoint, or a checkpoint of the weights")
    add("--name", metavar="STEP", help="the checkpoint of this name in FOLDER, such as step-00000200 (default: the latest)")
    add("--dtype", choices=dtypes, help="floating-point type in the new files (default: as it is)")
    add("--strip", default="", metavar="PREFIX", help="what all names begin with, and are to be without")
    add("--add", default="", metavar="PREFIX", help="what all names are to begin with")
    _json_option(parser)


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")
