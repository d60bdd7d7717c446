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
    """Windows of `sequence` tokens, one behind the other, without a shorter rest.

    limit: the number of tokens that the model knows.
    """

    def __init__(self, path: Path, values: Any, sequence: int, limit: int | None) -> None:
        self.path = path
        self.values = values
        self.sequence = sequence
        self.limit = limit

    def __len__(self) -> int:
        return len(self.values) // self.sequence

    def __getitem__(self, place: int) -> Tensor:
        if not 0 <= place < len(self):
            raise IndexError(place)
        part = self.values[place * self.sequence : (place + 1) * self.sequence].astype(np.int64)
        # Checked here: a look-up beyond the table is an assertion on a GPU that names no sample.
        strange = part < 0
        if self.limit is not None:
            strange = strange | (part >= self.limit)
        if strange.any():
            raise UsageError(
                f"{self.path}: token {int(part[strange][0])} in sample {place}"
                f" is none of the model's {self.limit}"
            )
        return torch.from_numpy(part)


def tokens(
    path: str | Path, sequence: int, *, type: str | None = None, limit: int | None = None
) -> Tokens:
    """The samples of a file of tokens: a flat `.npy` array, or raw numbers of a `type`.

    A text is a file of tokens of type "uint8", one for each byte. `limit`: the number of tokens
    that the model knows; others are refused.
    """
    path = Path(path)
    if type is not None and type not in TYPES:
        raise UsageError(unknown("type of tokens", type, TYPES))
    if sequence < 1:
        raise UsageError(f"a sequence has at least 1 token, not {sequence}")
    # A pipe would be waited for.
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file, so it is no file of tokens")
    try:
        if path.suffix == ".npy":
            # Mapped, not read: a corpus is larger than memory, and workers share its pages.
            values: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        elif type is None:
            raise UsageError(
                f"{path}: say of which type its numbers are ({', '.join(TYPES)}),"
                " or give a .npy file"
            )
        else:
            values = np.memmap(path, dtype=np.dtype(type), mode="r")
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path}: no file of tokens: {error}") from error
    if (
        values.ndim != 1
        or not np.issubdtype(values.dtype, np.integer)
        or (type is not None and values.dtype != np.dtype(type))
    ):
        raise UsageError(
            f"{path}: holds {values.dtype} {list(values.shape)};"
            f" tokens are one row of {type or 'whole numbers'}"
        )
    if len(values) < sequence:
        raise UsageError(f"{path}: has {len(values)} tokens, which is no sample of {sequence}")
    return Tokens(path, values, sequence, limit)
