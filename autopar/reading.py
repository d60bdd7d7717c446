"""The one door for files that are read whole: regular files, of a size that their kind may have.

A pipe would be waited for, a device never ends, and what is too large is no file of its kind.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from .errors import AutoparError, UsageError
from .units import bytes_text

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_bytes(path: str | Path, limit: int, *, what: str, error: type[AutoparError]) -> bytes:
    """The content of a file of at most `limit` bytes.

    `what`: what the file should be, for messages. Raises an `error` that names the path for any
    other file.
    """
    # A pipe is opened at once, though nobody writes; Windows has no such flags.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
            if kind != stat.S_IFREG:
                raise error(f"{path}: {_KINDS.get(kind, 'no file')}, and no {what}")
            # One byte more shows that a file is too large, however large it says that it is.
            content = file.read(limit + 1)
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}") from reason
    if len(content) > limit:
        raise error(f"{path}: larger than {bytes_text(limit)}, so it is no {what}")
    return content


def read_text(path: str | Path, limit: int, *, what: str, error: type[AutoparError]) -> str:
    """The text of a file in UTF-8; all else as in `read_bytes`."""
    try:
        return read_bytes(path, limit, what=what, error=error).decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"{path}: not text: {reason}") from reason


def read_json_object(
    path: str | Path, limit: int, *, what: str, error: type[AutoparError]
) -> dict[str, Any]:
    """The JSON object that is the whole of a file; all else as in `read_text`."""
    text = read_text(path, limit, what=what, error=error)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} cannot be read as a {what}: {reason}") from reason
    if not isinstance(data, dict):
        raise error(f"{path} holds no JSON object")
    return data


def parse_yaml(path: str | Path, text: str) -> dict[str, Any]:
    """The table in a text of YAML; a `UsageError` names the path of any other."""
    import yaml  # only files in YAML need it

    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as reason:
        raise UsageError(f"{path}: not YAML: {reason}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds no table")
    return data
