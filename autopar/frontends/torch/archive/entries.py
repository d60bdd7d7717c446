"""Opens a `torch.export` archive as untrusted bytes.

Entries are bounded, names are safe, JSON is checked, and risks are listed.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from autopar.errors import ModelError
from autopar.file_limits import ARCHIVE_ENTRIES

MODEL = "model"
"""The one program of an archive that is read, under the name that `torch.export.save` gives it."""
SHOWN = 5
_PLAIN_NAME = re.compile(r"[\w.\-+/ ]+")


class Malformed(ValueError):
    """The file is no archive that `torch.export.save` writes."""


@dataclass(slots=True)
class Doubts:
    """Parts of an archive that could run code of the file when read, in words."""

    parts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        if text not in self.parts:
            self.parts.append(text)

    def raise_any(self, path: str) -> None:
        """Raise a `ModelError` that lists the parts that need trust, if there are any."""
        if not self.parts:
            return
        more = f" and {len(self.parts) - SHOWN} more" if len(self.parts) > SHOWN else ""
        raise ModelError(
            f"{path} is not read: {'; '.join(self.parts[:SHOWN])}{more}. Reading it could run code "
            "of the file: "
            "give --trust if you trust who made it, or export the model "
            "again without it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The entries of an archive by their names without the root folder.

    `legacy`: the layout of torch 2.7 and older.
    """

    file: zipfile.ZipFile
    entries: Mapping[str, zipfile.ZipInfo]
    legacy: bool

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def size(self, name: str) -> int:
        """Bytes of an entry; a missing one is `Malformed`."""
        if name not in self.entries:
            raise Malformed(f"it holds no {name!r}")
        return self.entries[name].file_size

    def open(self, name: str) -> IO[bytes]:
        """An entry as a stream."""
        self.size(name)
        return self.file.open(self.entries[name])

    def read(self, name: str) -> bytes:
        """The bytes of an entry."""
        with self.open(name) as stream:
            return stream.read()

    def json(self, name: str) -> dict[str, Any]:
        """An entry that is a JSON object."""
        try:
            content = json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"{name} is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise Malformed(f"{name} is no JSON object")
        return content


@contextmanager
def opened(path: str | IO[bytes], size: int, doubts: Doubts) -> Iterator[Archive]:
    """The archive in a file of `size` bytes; no entry is larger than its bytes in the file."""
    try:
        with zipfile.ZipFile(path) as file:
            entries = bounded_entries(file, size, doubts)
            roots = {name.partition("/")[0] for name in entries}
            legacy = "serialized_exported_program.json" in entries
            if not legacy and len(roots) != 1:
                raise Malformed("its entries do not lie in one folder")
            if legacy:
                named = entries
            else:
                named = {name.partition("/")[2]: entry for name, entry in entries.items()}
            yield Archive(file=file, entries=named, legacy=legacy)
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        EOFError,
        OSError,
    ) as error:
        raise Malformed(str(error) or type(error).__name__) from error


def bounded_entries(file: zipfile.ZipFile, size: int, doubts: Doubts) -> dict[str, zipfile.ZipInfo]:
    """The entries by name.

    Torch stores them uncompressed, so together they are no larger than the file.
    """
    infos = file.infolist()
    if len(infos) > ARCHIVE_ENTRIES:
        raise Malformed(f"it has {len(infos)} entries")
    for info in infos:
        if (
            not _PLAIN_NAME.fullmatch(info.filename)
            or info.filename.startswith("/")
            or ".." in info.filename.split("/")
        ):
            raise Malformed(f"an entry is named {info.filename!r}")
        if info.flag_bits & 1:
            raise Malformed(f"{info.filename!r} is encrypted")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            doubts.add(f"{info.filename!r} is compressed, which torch.export.save never does")
    if len({info.filename for info in infos}) != len(infos):
        raise Malformed("two entries have the same name")
    if sum(info.compress_size for info in infos) > size:
        raise Malformed("its entries overlap")
    return {info.filename: info for info in infos}


def size_of_file(path: str) -> int:
    """Bytes of a regular file; anything else is a `ModelError`."""
    file = Path(path)
    if not file.exists():
        raise ModelError(f"{path}: no such file")
    if not file.is_file():
        raise ModelError(f"{path}: not a regular file")
    return file.stat().st_size
