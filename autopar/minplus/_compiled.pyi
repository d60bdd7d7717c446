"""The compiled min-plus kernel."""

import numpy as np
from numpy.typing import NDArray

def minimise(out: NDArray[np.float64], terms: tuple[NDArray[np.float64], ...], /) -> None: ...
