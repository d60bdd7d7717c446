"""Tensors in safetensors files, of which a rank reads only the slices of its shards."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ModelError, UsageError
from autopar.file_limits import HEADER_BYTES
from autopar.reading import read_text
from autopar.runtime.ranks.cuts import Cut

from .piece_tensors import runs_of

INDEX = "model.safetensors.index.json"
ENDING = ".safetensors"
_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
}
"""Element types that a model can be given, and their sizes."""


class _Open:
    """The file read last.

    It stays open, since a model's tensors come in about the order of their files.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None

    def __reduce__(self) -> tuple[type[_Open], tuple[()]]:
        # Open files cannot be pickled, so every rank opens its own.
        return _Open, ()

    def at(self, path: Path) -> Any:
        """The file at a path, as safetensors has it."""
        if path != self._path:
            from safetensors import SafetensorError, safe_open

            self._path = self._file = None
            try:
                self._file = safe_open(path, framework="pt")
                self._path = path
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
        return self._file


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor in a file, read as `dtype`; a call reads all of it.

    `fact`: bytes that must be equal on all ranks.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    stored: str
    dtype: torch.dtype
    fact: bytes
    opened: _Open = field(repr=False, compare=False)

    @property
    def is_float(self) -> bool:
        """Whether the file holds floating-point numbers."""
        return "F" in self.stored

    def __call__(self) -> Tensor:
        return self.shard(())

    def shard(self, cuts: Sequence[Cut]) -> Tensor:
        """The shard after the cuts, in memory of its own; nothing else of the tensor is read."""
        file = self.opened.at(self.path)
        if not self.shape:
            return torch.empty((), dtype=self.dtype).copy_(file.get_tensor(self.name))
        levels: dict[int, list[tuple[int, int, int]]] = {}
        for cut in cuts:
            levels.setdefault(cut.dim, []).append((cut.parts, cut.degree, cut.coordinate))
        runs = [runs_of(size, levels.get(dim, ())) for dim, size in enumerate(self.shape)]
        shard = torch.empty([sum(run.length for run in own) for own in runs], dtype=self.dtype)
        if not shard.numel():
            return shard
        for piece in itertools.product(*runs):
            there = tuple(slice(run.whole, run.whole + run.length) for run in piece)
            here = tuple(slice(run.local, run.local + run.length) for run in piece)
            # Each slice is cast as it is copied: the whole in the file's type is never in memory.
            shard[here] = file.get_slice(self.name)[there]
        return shard


def read_headers(where: str | Path) -> dict[str, FileTensor]:
    """Every tensor, by name, of a `.safetensors` file, or of a folder of such files.

    A folder holds an index, or no other files.
    """
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            "reading weights needs safetensors, which is not installed: "
            "pip install 'autopar[torch]'"
        ) from error
    opened = _Open()
    every: dict[str, FileTensor] = {}
    for path, listed in _files(Path(where)).items():
        tensors = _header(path, opened)
        if lost := [name for name in listed or () if name not in tensors]:
            raise ModelError(f"{path} lacks {', '.join(lost[:5])}, which the index says it holds")
        names = tensors if listed is None else listed
        every.update({name: tensors[name] for name in names})
    return every


def _files(where: Path) -> dict[Path, list[str] | None]:
    """The files to read, each with its tensors' names by the index (None: there is no index)."""
    if where.is_file() and where.name.endswith(ENDING):
        return {where: None}
    if not where.is_dir():
        text = "is no .safetensors file" if where.exists() else "does not exist"
        raise ModelError(
            f"the weights {where}: this {text}; give a .safetensors file, or a folder that holds "
            f"{INDEX} or such files"
        )
    if (where / INDEX).is_file():
        return _indexed(where)
    files = sorted(path for path in where.iterdir() if path.name.endswith(ENDING))
    if not files:
        raise ModelError(
            f"the weights {where}: the folder holds neither {INDEX} nor a {ENDING} file"
        )
    return dict.fromkeys(files)


def _indexed(folder: Path) -> dict[Path, list[str] | None]:
    path = folder / INDEX
    text = read_text(path, HEADER_BYTES, what="index of weights", error=ModelError)
    try:
        listed = json.loads(text)["weight_map"]
        names = [(str(name), str(file)) for name, file in listed.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} is no index of weights: {type(error).__name__}: {error}"
        ) from error
    if strange := [
        file for _, file in names if Path(file).name != file or not file.endswith(ENDING)
    ]:
        raise ModelError(
            f"{path} names {strange[0]!r}, which is no {ENDING} file in its own folder"
        )
    files = dict.fromkeys(file for _, file in names)
    return {folder / file: [name for name, where in names if where == file] for file in files}


def _header(path: Path, opened: _Open) -> dict[str, FileTensor]:
    """The tensors of one file, by its header alone."""
    # A pipe would be waited for.
    if not path.is_file():
        raise ModelError(f"{path} cannot be read as a safetensors file: it is no regular file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            # A broken file must not make this process ask for all memory.
            if length > min(size, HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes")
            raw = file.read(length)
        entries: dict[str, Any] = {n: e for n, e in json.loads(raw).items() if n != "__metadata__"}
        fact = hashlib.sha256(f"{path.name}\0{size}\0".encode() + raw).digest()
        return {name: _tensor(name, entry, path, fact, opened) for name, entry in entries.items()}
    except (
        OSError,
        ValueError,
        struct.error,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ModelError(f"{path} cannot be read as a safetensors file: {error}") from error


def _tensor(name: str, entry: Any, path: Path, fact: bytes, opened: _Open) -> FileTensor:
    stored = str(entry["dtype"])
    shape = tuple(int(size) for size in entry["shape"])
    if stored not in _BYTES:
        raise ValueError(
            f"{name!r} has the element type {stored}; readable are {', '.join(_BYTES)}"
        )
    return FileTensor(
        name=name,
        path=path,
        shape=shape,
        stored=stored,
        dtype=_DTYPES[stored],
        fact=fact + name.encode(),
        opened=opened,
    )


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
