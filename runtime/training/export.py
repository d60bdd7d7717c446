"""Weights for others: safetensors files and their index, as Hugging Face writes them.

They come from a checkpoint or a module. One tensor is read at a time, and one file is in memory.
`autopar.parallelize(..., weights=FOLDER)` reads such folders.
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
from autopar.runtime.files.weight_files import ENDING, INDEX
from autopar.runtime.ranks.agreement import agree

from .checkpoint_storage import SafeReader
from .durable_files import synchronise, torch_dtype, write_synchronised
from .latest import find_checkpoint
from .manifest import MODEL, Entry, read_manifest
from .rank_facts import device_of
from .saving import save

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

    `checkpoint`: a checkpoint, or a folder of them, of which the latest is taken, or the one called
    `name`. `dtype`: the type of floating-point numbers in the files (default: the stored type).
    `strip`: a prefix to remove from all names, if the model was inside another; `add`: a prefix to
    add instead. A folder is there whole or not at all.
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
    require_prefix(entries, strip)
    # Written under another name and renamed, so that nobody reads a half.
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


def export_weights(
    module: nn.Module,
    folder: str | Path,
    *,
    dtype: str | None = None,
    strip: str = "",
    limit: int = LIMIT,
) -> Path:
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
    # A folder that is there on one machine alone must stop every rank.
    agree({}, failure=failure, device=device_of(module))
    # A checkpoint in between: DCP gathers the pieces of all ranks on the disk, not in memory.
    between = target.parent / f".{target.name}.checkpoint"
    path = save(module, None, between, step=0).wait()
    try:
        # The checkpoint is on a disk that all ranks see, so one of them writes the export.
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
    reader: SafeReader,
    entries: Mapping[str, Entry],
    folder: Path,
    dtype: str | None,
    renamed: Mapping[str, str],
    limit: int,
) -> None:
    """Write the files of tensors, and the index where there are several."""
    from safetensors.torch import save_file

    sizes = {name: math.prod(entry.shape) * _width(entry, dtype) for name, entry in entries.items()}
    files = parts_within(sizes, limit)
    where = {}
    total = 0
    for number, names in enumerate(files):
        # The names that Hugging Face's loaders look for.
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
    files: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if files[-1] and total + size > limit:
            files.append([])
            total = 0
        files[-1].append(name)
        total += size
    return files


def require_prefix(names: Iterable[str], prefix: str) -> None:
    """Refuse names from which a prefix cannot be removed."""
    for name in names:
        if not name.startswith(prefix) or name == prefix:
            raise UsageError(f"{name!r} does not begin with {prefix!r}")


def _target_type(entry: Entry, dtype: str | None) -> torch.dtype:
    """The type of a tensor in the files; integers keep theirs."""
    own = torch_dtype(entry.dtype)
    return torch_dtype(dtype) if dtype is not None and own.is_floating_point else own


def _width(entry: Entry, dtype: str | None) -> int:
    """Bytes of an element in the files."""
    return _target_type(entry, dtype).itemsize


def _whole(reader: SafeReader, entry: Entry, dtype: str | None) -> Tensor:
    """A tensor put together from its pieces."""
    whole = torch.empty(entry.shape, dtype=_target_type(entry, dtype))
    for piece in entry.pieces:
        dims = zip(piece.offsets, piece.shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in dims)] = reader.read(piece)
    return whole
