"""Files that survive a killed process or a lost machine, and the sums of their tensors."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import PlanError

from .latest import LATEST, latest_in, pointer_text
from .manifest import UNFINISHED, checkpoints_in


def checksum_of(value: Tensor) -> int:
    """The CRC-32 of the bytes of a tensor on the host."""
    return zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data) if value.numel() else 0


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type, as plans have it."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The type of a name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"the checkpoint has tensors of type {name!r}, which torch does not know")
    return dtype


def synchronise(path: Path) -> None:
    """Synchronise a file's contents, or a folder's names, to the disk."""
    # A folder is synchronised like a file: its entries are names that may else be lost.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synchronised(path: Path, text: str) -> None:
    """Write a file that nobody reads yet."""
    path.write_text(text, encoding="utf-8")
    synchronise(path)


def point_to(folder: Path, name: str) -> None:
    """Let `latest` name another checkpoint, in one move."""
    write_synchronised(folder / f".{LATEST}", pointer_text(folder / name))
    # A rename replaces the file at once: readers see the old name or the new one.
    os.replace(folder / f".{LATEST}", folder / LATEST)
    synchronise(folder)


def sweep(folder: Path) -> None:
    """Remove the remains of killed saves."""
    for path in folder.glob(UNFINISHED + "*"):
        shutil.rmtree(path, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a folder that was begun, whatever is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def prune(folder: Path, keep: int, own: Collection[str]) -> None:
    """Remove all but the last `keep` of a training's `own` checkpoints and the latest.

    They are renamed before the removal, so that nobody sees half a checkpoint.
    """
    names = [name for name in checkpoints_in(folder) if name in own]
    for name in names[:-keep]:
        if name != latest_in(folder):
            # Under the name of an unfinished save, which the next one removes if this process is
            # killed.
            gone = (folder / name).rename(folder / (UNFINISHED + name))
            shutil.rmtree(gone, ignore_errors=True)
