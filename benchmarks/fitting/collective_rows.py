"""Measured collectives of a folder.

Every fifth size of a curve (collective, ranks) is held out of all fits.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
"""Collectives of the files by the names that they have there."""
SUMMING = ("all_reduce", "reduce_scatter")
FOLDS = 5
"""Points are in five folds, of which fold 0 is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One time of one collective: `nbytes` by the convention of the cost model.

    `summed`: in a type that links and switches add up. `device`: where it was measured.
    """

    kind: str
    group: int
    nbytes: float
    seconds: float
    summed: bool
    device: str = ""

    @property
    def fold(self) -> int:
        """The fold of this point, the same for all versions of a library.

        Each curve starts with another one.
        """
        return (
            round(math.log2(max(self.nbytes, 1.0)))
            + zlib.crc32(f"{self.kind} {self.group}".encode())
        ) % FOLDS

    @property
    def held_out(self) -> bool:
        """Whether no fit sees this point."""
        return self.fold == 0

    @property
    def usual(self) -> bool:
        """Whether training has such collectives.

        8-bit integers are moved, but switches do not sum them.
        """
        return self.summed or self.kind not in SUMMING


def devices(folder: Path) -> tuple[str, ...]:
    """The devices whose collectives the folder has."""
    return tuple(
        sorted(
            path.name.split(".")[0].removeprefix("collectives_")
            for path in folder.glob("collectives_*.csv*")
        )
    )


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from csv.DictReader(file)


def collective_rows(folder: Path, device: str) -> list[Row]:
    """NCCL's own collectives on a device that nothing speaks against (an empty `trap`)."""
    table = []
    for path in sorted(folder.glob(f"collectives_{device}.csv*")):
        for line in _lines(path):
            if line["kind"] == "nccl" and not line["trap"] and line["op"] in KINDS:
                sizes = {"nbytes": float(line["bytes"]), "seconds": float(line["seconds"])}
                table.append(
                    Row(
                        kind=KINDS[line["op"]],
                        group=int(line["gpus"]),
                        summed=line["dtype"] == "half",
                        device=device,
                        **sizes,
                    )
                )
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Rows as arrays."""

    group: NDArray[np.int64]
    nbytes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, rows: list[Row]) -> Points:
        """The arrays of some rows."""
        return cls(
            group=np.array([row.group for row in rows], dtype=np.int64),
            nbytes=np.array([row.nbytes for row in rows], dtype=np.float64),
            seconds=np.array([row.seconds for row in rows], dtype=np.float64),
        )
