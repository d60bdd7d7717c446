"""`autopar train`: the training of a file, on ranks of a launcher or of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from autopar.errors import RunError, UsageError

from .config import Config, load_config


def train(args: argparse.Namespace) -> None:
    """Train, and say how far it went."""
    config = _with_options(load_config(args.config), args)
    for folder in (
        str(Path(args.config).absolute().parent),
        os.getcwd(),
    ):  # where callables of the user are found
        if folder not in sys.path:
            sys.path.insert(0, folder)
    from autopar.runtime.launch import launched, launched_first, run_ranks

    from .loop import train

    if launched() is not None:
        made = train(config)
    else:
        ranks = config.training.ranks or 1
        if ranks > 1:
            _require_cpu(config, ranks, args.config)
        made = (
            train(config)
            if ranks == 1
            else run_ranks(train, ranks, config, timeout=config.training.timeout, endless=True)[0]
        )
    if launched_first():
        done = f"{made} steps made" if made else "nothing is left to do"
        print(
            f"{done}; the training of {config.training.steps} steps is in {config.training.folder}"
        )


def _with_options(config: Config, args: argparse.Namespace) -> Config:
    """The file's training, overruled by the command line."""
    for name, value in (("ranks", args.ranks), ("steps", args.steps)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; it must be at least 1")
    folder = None if args.folder is None else str(Path(args.folder).absolute())
    given: dict[str, Any] = {"ranks": args.ranks, "steps": args.steps, "folder": folder}
    said = {name: value for name, value in given.items() if value is not None}
    return config.model_copy(update={"training": config.training.model_copy(update=said)})


def _require_cpu(config: Config, ranks: int, path: str) -> None:
    from autopar.runtime.launch import default_backend

    if (config.training.backend or default_backend()) != "gloo":
        raise RunError(
            f"ranks on GPUs are started by torchrun: torchrun --nproc-per-node {ranks} -m autopar "
            f"train {path}"
        )
