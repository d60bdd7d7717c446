"""Answers remembered on disk: compressed texts under a digest of all that they depend on.

The folder is that of the environment variable `AUTOPAR_CACHE`, or `autopar` in the user's folder of
caches; an empty variable turns it off. It may be deleted at any time. A text that cannot be
written, or is larger than `FILE_BYTES` or `TEXT_BYTES`, is not remembered.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import AutoparError, UsageError
from .outputs import write_whole
from .reading import read_bytes

FOLDER = "AUTOPAR_CACHE"
TEXTS = 256
"""Texts that are kept; the oldest ones go first."""
FILE_BYTES = 2**20
"""The largest compressed text."""
TEXT_BYTES = 2**26
"""The largest text: what a file may be decompressed to."""
_ENDING = ".txt.z"
_ALL = "*.txt*"
"""The files of this folder, those of earlier versions among them."""
_SOURCE = Path(__file__).parent


def key_of(parts: Iterable[str | bytes], packages: Iterable[str]) -> str:
    """The digest of all that an answer depends on: `parts`, and the versions of packages."""
    digest = hashlib.sha256()
    for part in (*parts, *map(_version, packages)):
        data = part.encode() if isinstance(part, str) else part
        # The length keeps the end of one part from being the beginning of the next.
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def source_of(*rooms: str) -> Iterator[bytes]:
    """The code of files and folders of this package, on which an answer may depend."""
    for room in rooms:
        place = _SOURCE / room
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield path.read_bytes()


def recalled(key: str) -> str | None:
    """The text under a key, if it is remembered."""
    folder = _folder()
    if folder is None or not (folder / f"{key}{_ENDING}").exists():
        return None
    try:
        stored = read_bytes(folder / f"{key}{_ENDING}", FILE_BYTES, what="answer", error=UsageError)
        opened = zlib.decompressobj()
        text = opened.decompress(stored, TEXT_BYTES)
        return text.decode() if opened.eof else None
    except (AutoparError, zlib.error, UnicodeDecodeError):
        return None


def remember(key: str, text: str) -> None:
    """Remember a text under a key, and forget the oldest of too many."""
    folder = _folder()
    if folder is None or len(text) > TEXT_BYTES or len(data := text.encode()) > TEXT_BYTES:
        return
    stored = zlib.compress(data)
    if len(stored) > FILE_BYTES:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(folder / f"{key}{_ENDING}", stored)
        _forget(folder)
    except (OSError, AutoparError):
        # A full or read-only disk costs the memory of an answer, not the answer.
        return


def _folder() -> Path | None:
    named = os.environ.get(FOLDER)
    if named is not None:
        return Path(named) if named else None
    own = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(own) if own else Path.home() / ".cache") / "autopar"
    except RuntimeError:  # a user without a folder
        return None


def _forget(folder: Path) -> None:
    texts = sorted(folder.glob(_ALL), key=lambda path: path.stat().st_mtime)
    for path in texts[:-TEXTS]:
        path.unlink(missing_ok=True)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} -"
