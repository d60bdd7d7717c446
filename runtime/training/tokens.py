"""`tokens`: a text as numbers in a file, which is memory-mapped; a sample is a window of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from autopar.errors import UsageError, unknown

TYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class Tokens(Dataset[Tensor]):
    """Windows of `sequence` tokens, one behind the other, without a shorter rest; `limit`: known tokens."""

    def __init__(self, path: Path, values: Any, sequence: int, limit: int | None) -> None:
        self.path, self.values, self.sequence, self.limit = path, values, sequence, limit

    def __len__(self) -> int:
        return len(self.values) // self.sequence

    def __getitem__(self, place: int) -> Tensor:
        if not 0 <= place < len(self):
            raise IndexError(place)
        part = self.values[place * self.sequence : (place + 1) * self.sequence].astype(np.int64)
        if part.min() < 0 or (self.limit is not None and part.max() >= self.limit):
            strange = int(part[(part < 0) | (part >= (self.limit if self.limit is not None else np.inf))][0])
            raise UsageError(f"{self.path}: token {strange} in sample {place} is none of the model's {self.limit}")
        return torch.from_numpy(part)


def tokens(path: str | Path, sequence: int, *, type: str | None = None, limit: int | None = None) -> Tokens:
    """The samples of a file of tokens: a flat `.npy` array of whole numbers, or raw numbers of a `type`.

    A text is a file of tokens of type "uint8", one for each byte. `limit`: the number of tokens that the model knows;
    others are refused.
    """
    path = Path(path)
    if type is not None and type not in TYPES:
        raise UsageError(unknown("type of tokens", type, TYPES))
    if sequence < 1:
        raise UsageError(f"a sequence has at least 1 token, not {sequence}")
    try:
        if path.suffix == ".npy":
            values: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        elif type is None:
            raise UsageError(f"{path}: say of which type its numbers are ({', '.join(TYPES)}), or give a .npy file")
        else:
            values = np.memmap(path, dtype=np.dtype(type), mode="r")
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path}: no file of tokens: {error}") from error
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer) or (type is not None and values.dtype != np.dtype(type)):
        raise UsageError(f"{path}: holds {values.dtype} {list(values.shape)}; tokens are one row of {type or 'whole numbers'}")
    if len(values) < sequence:
        raise UsageError(f"{path}: has {len(values)} tokens, which is no sample of {sequence}")
    return Tokens(path, values, sequence, limit)
