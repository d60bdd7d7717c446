"""The files that a command reads and writes; no file may be both."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.errors import UsageError
from autopar.frontends.huggingface import PREFIX
from autopar.outputs import check_output

_READ = (
    "model",
    "plan",
    "plan2",
    "diff",
    "cluster",
    "load",
    "reuse_from",
    "inside",
    "weights",
    "config",
    "measured",
    "tp_plan",
)


def check_outputs(args: argparse.Namespace, *outputs: str | None) -> None:
    """Refuse outputs that cannot be written, are the same file, or are inputs of the command."""
    paths = [Path(path) for path in outputs if path]
    for index, path in enumerate(paths):
        check_output(path, inputs(args))
        if path.resolve() in [other.resolve() for other in paths[:index]]:
            raise UsageError(f"{path}: two outputs cannot be one file")
        if path.exists() and str(getattr(args, "model", None) or "").endswith(".onnx"):
            from autopar.frontends.onnx import external_files

            check_output(path, external_files(args.model))


def inputs(args: argparse.Namespace) -> list[str]:
    """The files that a command reads according to its arguments.

    Modules count only if they are below the present folder.
    """
    named = [getattr(args, name, None) for name in _READ]
    given = [
        value
        for held in named
        for value in (held if isinstance(held, list) else [held])
        if isinstance(value, str)
    ]
    functions = [*given, getattr(args, "loss", None) or ""]
    modules = [
        *(text.partition(":")[0] for text in functions if ":" in text),
        *getattr(args, "rules", []),
    ]
    return [
        *(text.removeprefix(PREFIX) for text in given),
        *(f"{name.replace('.', '/')}.py" for name in modules),
    ]
