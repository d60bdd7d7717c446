"""The compiled loops."""

from array import array

import numpy as np
from numpy.typing import NDArray

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
