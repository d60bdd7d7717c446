"""The compiled loops."""

from array import array

import numpy as np
from numpy.typing import NDArray

from .streams_in_python import Links, Score, Times

def minimise(out: NDArray[np.float64], terms: tuple[NDArray[np.float64], ...], /) -> None: ...
def eliminate(
    tables: list[NDArray[np.float64]], program: array[int], leaves: int, wanted: bytes, /
) -> None: ...
def assign(
    tables: list[NDArray[np.float64]],
    program: array[int],
    leaves: int,
    steps: array[int],
    choices: NDArray[np.int64],
    /,
) -> None: ...
def play(score: Score, links: Links, slowdown: float, times: Times, /) -> None: ...
