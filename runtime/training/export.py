"""Weights for others: safetensors files and their index, as Hugging Face writes them, from a checkpoint or a module.

It reads one tensor at a time, and holds one file in memory. `autopar.parallelize(..., weights=FOLDER)` reads such
folders.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import PlanError, UsageError, unknown
from autopar.ir.dtype import FLOATS

from ..agreement import agree
from ..weight_files import ENDING, INDEX
from .manifest import MODEL, Entry, find_checkpoint, read_manifest
from .saving import device_of, save
from .storage import SafeReader, synchronise, torch_dtype, write_synchronised

LIMIT = 5 * 10**9
"""Bytes of a file, unless a single tensor is larger; Hugging Face's own."""
SINGLE = f"model{ENDING}"


def export_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    strip: str = "",
    add: str = "",
    limit: int = LIMIT,
    name: str | None = None,
) -> Path:
    """Write the parameters and buffers of a checkpoint as safetensors files into a new folder.

    `checkpoint`: a checkpoint, or a folder of them, of which the latest is taken, or the one called `name`. `dtype`:
    the type of floating-point numbers in the files (default: the stored type). `strip`: a prefix to remove from all
    names, if the model was inside another; `add`: a prefix to add instead. A folder is there whole or not at all.
    """
    target = Path(folder).absolute()
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(unknown("floating-point type", dtype, FLOATS))
    if target.exists():
        raise UsageError(f"{target}: is there already; name a new folder")
    path = find_checkpoint(checkpoint, name)
    if path is None:
        raise PlanError(f"{checkpoint}: holds no checkpoint")
    reader = SafeReader(path, read_manifest(path)[0])
    entries = reader.manifest.named(MODEL)
    if other := [name for name in entries if not name.startswith(strip) or name == strip]:
        raise UsageError(f"{other[0]!r} does not begin with {strip!r}")
    making = target.parent / f".{target.name}.making"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        reader.require_whole()
        renamed = {name: add + name.removeprefix(strip) for name in entries}
        _write(reader, entries, making, dtype, renamed, limit)
        making.rename(target)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    synchronise(target.parent)
    return target


def export_weights(module: nn.Module, folder: str | Path, *, dtype: str | None = None, strip: str = "", limit: int = LIMIT) -> Path:
    """Write the present weights of a module, planned or plain; every rank calls this.

    It needs the space of the result once more, next to the folder.
    """
    target = Path(folder).absolute()
    failure: Exception | None = None
    try:
        if target.exists():
            raise UsageError(f"{target}: is there already; name a new folder")
    except Exception as error:
        failure = error
    agree({}, failure=failure, device=device_of(module))
    between = target.parent / f".{target.name}.checkpoint"
    path = save(module, None, between, step=0).wait()
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            export_checkpoint(path, target, dtype=dtype, strip=strip, limit=limit)
    except Exception as error:
        failure = error
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(between, ignore_errors=True)
    agree({}, failure=failure, device=device_of(module))
    return target


def _write(
    reader: SafeReader, entries: Mapping[str, Entry], folder: Path, dtype: str | None, renamed: Mapping[str, str], limit: int
) -> None:
    from safetensors.torch import save_file

    files = parts_within({name: math.prod(entry.shape) * _width(entry, dtype) for name, entry in entries.items()}, limit)
    where, total = {}, 0
    for number, names in enumerate(files):
        file = SINGLE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}{ENDING}"
        values = {renamed[name]: _whole(reader, entries[name], dtype) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
        synchronise(folder / file)
        where.update(dict.fromkeys(values, file))
        total += sum(value.nbytes for value in values.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_synchronised(folder / INDEX, json.dumps(index, indent=2) + "\n")
    synchronise(folder)


def parts_within(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names file by file, in their order, each file within the limit where that can be.

    >>> parts_within({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    found: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if found[-1] and held + size > limit:
            found.append([])
            held = 0
        found[-1].append(name)
        held += size
    return found


def _target_type(entry: Entry, dtype: str | None) -> torch.dtype:
    own = torch_dtype(entry.dtype)
    return torch_dtype(dtype) if dtype is not None and own.is_floating_point else own


def _width(entry: Entry, dtype: str | None) -> int:
    return _target_type(entry, dtype).itemsize


def _whole(reader: SafeReader, entry: Entry, dtype: str | None) -> Tensor:
    """A tensor put together from its pieces."""
    found = torch.empty(entry.shape, dtype=_target_type(entry, dtype))
    for piece in entry.pieces:
        places: Iterable[slice] = (slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
        found[tuple(places)] = reader.read(piece)
    return found
