"""Which checkpoint of a folder is meant: the one that `latest` names, or another.

`latest` has the name of a checkpoint and the digest of its manifest, so that one changed bit does
not make it another's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from autopar.errors import PlanError, unknown
from autopar.file_limits import NAME_BYTES
from autopar.reading import read_text

from .manifest import MANIFEST, NAME, checkpoints_in, part_text, read_manifest, told_digest

LATEST = "latest"
_POINTER = re.compile(rf"(?P<name>{NAME.pattern})(?: (?P<digest>[0-9a-f]{{64}}))?\n?")


def step_folders(folder: Path) -> list[str]:
    """The names of all folders of steps, whole or not, the largest step last."""
    matches = filter(None, (NAME.fullmatch(path.name) for path in folder.glob("step-*")))
    return [m[0] for m in sorted(matches, key=lambda m: (int(m[1]), int(m[2] or 0)))]


def latest_in(folder: Path) -> str | None:
    """The name that `latest` holds; None where nothing was saved."""
    pointer = _pointer_in(folder)
    return None if pointer is None else pointer["name"]


def pointer_text(path: Path) -> str:
    """The text of `latest` for a checkpoint that is saved."""
    return f"{path.name} {told_digest(part_text(path / MANIFEST))}\n"


def _pointer_in(folder: Path) -> re.Match[str] | None:
    path = folder / LATEST
    if not os.path.lexists(path):
        return None
    text = read_text(path, NAME_BYTES, what="name of a checkpoint", error=PlanError)
    pointer = _POINTER.fullmatch(text)
    if pointer is None:
        raise PlanError(
            f"{path}: names {text.strip()[:80]!r}, which is no checkpoint; without this file the "
            "newest whole checkpoint is taken"
        )
    return pointer


def _require_pointed(folder: Path) -> None:
    """Refuse a `latest` with another digest than that of the checkpoint which it names.

    One changed bit may turn the name into that of another checkpoint. A name alone, of a version
    without digests or of somebody's hand, is taken as it is.
    """
    pointer = _pointer_in(folder)
    if pointer is None or pointer["digest"] is None:
        return
    path = folder / pointer["name"]
    if told_digest(part_text(path / MANIFEST)) != pointer["digest"]:
        # A damaged manifest says so itself.
        read_manifest(path)
        raise PlanError(
            f"{folder}: {LATEST} is damaged: it names {path.name}, but not by the digest of its "
            f"{MANIFEST}; name a checkpoint: {', '.join(checkpoints_in(folder))}"
        )


def say_on_stderr(line: str) -> None:
    """Tell the user one line."""
    print(f"autopar: {line}", file=sys.stderr)


def find_checkpoint(
    folder: str | Path, name: str | None = None, say: Callable[[str], None] = say_on_stderr
) -> Path | None:
    """The checkpoint of that name, or the latest; None where nothing was saved.

    folder: one of checkpoints, or a checkpoint itself. Where `latest` is lost, the newest whole
    checkpoint is taken, which `say` is told.
    """
    folder = Path(folder)
    # A path to one checkpoint works wherever a folder of them does.
    if name is None and (folder / MANIFEST).is_file():
        return folder
    wanted = name or latest_in(folder)
    if wanted is None:
        return _newest_whole(folder, say)
    # `latest` may name a checkpoint that somebody removed by hand.
    if wanted not in checkpoints_in(folder):
        raise PlanError(f"{folder}: " + unknown("checkpoint", wanted, checkpoints_in(folder)))
    if name is None:
        _require_pointed(folder)
    return folder / wanted


def _newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The whole checkpoint of the largest step: times do not survive the copy that lost `latest`.

    Folders of steps of which none is whole are refused, as the training would begin again.
    """
    names = step_folders(folder)
    for name in reversed(names):
        try:
            read_manifest(folder / name)
        except PlanError as error:
            say(f"{name} is passed over: {error}")
            continue
        say(f"{folder}: {LATEST} is missing; {name} is the newest checkpoint that is whole")
        return folder / name
    if names:
        raise PlanError(
            f"{folder}: {LATEST} is missing, and of {', '.join(names)} none is whole; copy the "
            "checkpoints once more, or give another folder to begin again"
        )
    return None
