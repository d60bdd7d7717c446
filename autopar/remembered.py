"""Answers remembered on disk: compressed texts under a digest of all that they depend on.

The folder is that of the environment variable `AUTOPAR_CACHE`, or `autopar` in the user's folder of
caches; an empty variable turns it off. It may be deleted at any time. A text that cannot be
written, or is larger than `FILE_BYTES` or `TEXT_BYTES`, is not remembered.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import AutoparError, UsageError
from .outputs import write_whole
from .reading import read_bytes

FOLDER = "AUTOPAR_CACHE"
TEXTS = 2048
"""The most texts in the folder; those not asked for longest go first."""
BYTES = 2**28
"""The most bytes of all files in the folder."""
FILE_BYTES = 2**24
"""The largest compressed text."""
TEXT_BYTES = 2**26
"""The largest text: what a file may be decompressed to."""
_ENDING = ".txt.z"
_OURS = re.compile(r"\.?(?:(?P<kind>[a-z]+)-)?[0-9a-f]{64}\.txt")
"""How names in the folder begin, those of earlier versions and of files half written among them."""
_CODE = ("*.py", "*.c", "*.json")
_SOURCE = Path(__file__).parent
_switched_off = False


def key_of(kind: str, parts: Iterable[str | bytes], packages: Iterable[str]) -> str:
    """The key of an answer of a kind: a digest of all `parts`, and of the versions of packages."""
    digest = hashlib.sha256()
    for part in (*parts, *map(_version, packages)):
        data = part.encode() if isinstance(part, str) else part
        # The length keeps the end of one part from being the beginning of the next.
        digest.update(len(data).to_bytes(8, "big") + data)
    return f"{kind}-{digest.hexdigest()}"


@functools.cache
def source_of(*rooms: str) -> str:
    """A digest of the code and data in files and folders of this package."""
    digest = hashlib.sha256()
    for room in rooms:
        place = _SOURCE / room
        inside = [path for ending in _CODE for path in place.rglob(ending)]
        for path in sorted(inside) if place.is_dir() else [place]:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def recalled(key: str) -> str | None:
    """The text under a key, if it is remembered."""
    folder = folder_of_answers()
    if folder is None or not (path := folder / f"{key}{_ENDING}").exists():
        return None
    try:
        stored = read_bytes(path, FILE_BYTES, what="answer", error=UsageError)
        opened = zlib.decompressobj()
        text = opened.decompress(stored, TEXT_BYTES)
        if not opened.eof:
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(path)
        return text.decode()
    except (AutoparError, zlib.error, UnicodeDecodeError):
        return None


def remember(key: str, text: str) -> None:
    """Remember a text under a key, and forget what is too much."""
    folder = folder_of_answers()
    if folder is None or len(text) > TEXT_BYTES or len(data := text.encode()) > TEXT_BYTES:
        return
    stored = zlib.compress(data, level=1)
    if len(stored) > FILE_BYTES:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(folder / f"{key}{_ENDING}", stored)
        _forget(folder)
    except (OSError, AutoparError):
        # A full or read-only disk costs the memory of an answer, not the answer.
        return


@contextlib.contextmanager
def remembering_nothing() -> Iterator[None]:
    """Within it nothing is recalled, and nothing remembered."""
    global _switched_off
    before = _switched_off
    _switched_off = True
    try:
        yield
    finally:
        _switched_off = before


def folder_of_answers() -> Path | None:
    """The folder of answers, which need not exist; None if nothing is remembered."""
    if _switched_off:
        return None
    named = os.environ.get(FOLDER)
    if named is not None:
        return Path(named) if named else None
    own = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(own) if own else Path.home() / ".cache") / "autopar"
    except RuntimeError:  # a user without a folder
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers in the folder: their number by kind, and the bytes of all files."""

    counts: dict[str, int]
    bytes: int


def answers() -> Answers:
    """The answers in the folder."""
    folder = folder_of_answers()
    files = [] if folder is None else _files(folder)
    kinds = Counter(match["kind"] or "other" for path, *_ in files if (match := _match(path)))
    return Answers(counts=dict(sorted(kinds.items())), bytes=sum(size for _, _, size in files))


def forget_all() -> int:
    """Remove the files of all answers, and nothing else in the folder; their number."""
    folder = folder_of_answers()
    files = [] if folder is None else _files(folder)
    for path, *_ in files:
        path.unlink(missing_ok=True)
    return len(files)


def _match(path: Path) -> re.Match[str] | None:
    return _OURS.match(path.name)


def _files(folder: Path) -> list[tuple[Path, float, int]]:
    """The files of answers with the times of their last use and their bytes, the newest first."""
    files = []
    for path in folder.iterdir() if folder.is_dir() else ():
        # Another process may have removed it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if _match(path):
                about = path.lstat()
                files.append((path, about.st_mtime, about.st_size))
    return sorted(files, key=lambda file: (-file[1], file[0].name))


def _forget(folder: Path) -> None:
    total = 0
    for number, (path, _, size) in enumerate(_files(folder)):
        total += size
        if number >= TEXTS or total > BYTES:
            path.unlink(missing_ok=True)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} -"
