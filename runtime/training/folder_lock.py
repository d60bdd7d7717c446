"""A folder of checkpoints is written by one training at a time.

The lock is the operating system's, on a file in the folder: it ends with its process, however that
ends, so no stale lock can be left behind.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import IO

from autopar.errors import RunError

LOCK = "training.lock"
_HELD: dict[Path, IO[str]] = {}
"""The locks of this process, or of the one that it was forked from, which waits for it."""


def hold(folder: Path) -> None:
    """Lock a folder until this process ends; `RunError` where another one has it."""
    import fcntl

    place = folder.resolve()
    if place in _HELD:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (place / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: nothing can be saved here: {error}") from error
    try:
        # A lock of the process alone: with `flock`, a loader's workers would keep it.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        stream.seek(0)
        holder = stream.read(200).strip() or "another process"
        stream.close()
        raise RunError(
            f"{folder}: {holder} trains into this folder; stop it, or give another folder"
        ) from error
    stream.truncate(0)
    stream.write(f"process {os.getpid()} of {socket.gethostname()}\n")
    stream.flush()
    _HELD[place] = stream
