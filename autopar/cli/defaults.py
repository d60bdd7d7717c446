"""Defaults of options from `autopar.toml` in the present folder.

The file has a table for each command, and in it a key for each option.

    [plan]
    cluster = "dgx-h100"
    devices = 64

The command line takes precedence; options that may be repeated add up.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import UsageError, unknown
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.reading import read_text

FILE = "autopar.toml"


def with_defaults(
    argv: Sequence[str], options: dict[str, list[str]], folder: Path | None = None
) -> list[str]:
    """The arguments, after those of the file for the same command.

    `options`: the options of every command.
    """
    path = (folder or Path()) / FILE
    if not argv or argv[0] not in options or {"-h", "--help"} & set(argv) or not path.is_file():
        return list(argv)
    data = _read(path)
    wrong = [name for name in data if name not in options]
    if wrong:
        raise UsageError(f"{path}: " + unknown("command", wrong[0], options))
    table = data.get(argv[0], {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [{argv[0]}] is no table")
    given = [
        word
        for name, value in table.items()
        for word in _words(path, argv[0], name, value, options[argv[0]])
    ]
    # Of an option that is given twice the last counts, so the command line comes last.
    return [argv[0], *given, *argv[1:]]


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path, CONFIGURATION_BYTES, what="file of defaults", error=UsageError)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def _words(path: Path, command: str, name: str, value: Any, options: list[str]) -> Iterator[str]:
    option = f"--{name.replace('_', '-')}"
    if option not in options:
        raise UsageError(
            f"{path}: [{command}]: "
            + unknown("option", name, [word.removeprefix("--") for word in options])
        )
    if value is False:
        return
    for one in value if isinstance(value, list) else [value]:
        if one is True:
            yield option
        elif isinstance(one, str | int | float):
            # In one word, since a value may begin with a dash.
            yield f"{option}={one}"
        else:
            raise UsageError(f"{path}: [{command}]: {name} is neither a text nor a number")
