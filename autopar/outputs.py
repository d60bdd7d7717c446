"""Output files: whole or not at all, regular files only, and never a command's input."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .errors import UsageError


def check_output(path: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse, before the work, a path that cannot or must not be written.

    `inputs` are files that the command reads.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"{path}: cannot be written: "
            + ("it is a folder" if path.is_dir() else f"there is no folder {path.parent}")
        )
    _target(path)
    for given in inputs:
        try:
            same = path.exists() and Path(given).exists() and path.samefile(given)
        except (OSError, ValueError):  # what is no path is no file either
            continue
        if same:
            raise UsageError(
                f"{path}: cannot be written: the command reads it (as {given}); give another file"
            )


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary one in its folder, so no reader sees half of it.

    Links are followed.
    """
    target = _target(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, _mode(target))
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _target(path: Path) -> Path:
    """The regular file, present or not, at the end of a path's links.

    `UsageError` for devices, pipes and the like.
    """
    try:
        target = path.resolve()
        # From Python 3.13 on a circle of links is resolved to one of them.
        odd = target.is_symlink() or (target.exists() and not target.is_file())
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{str(path)!r}: cannot be written: {error}") from error
    if odd:
        raise UsageError(f"{path}: cannot be written: it is no regular file")
    return target


def _mode(target: Path) -> int:
    """The permissions of the replaced file, or else of a new one."""
    if target.exists():
        return target.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
