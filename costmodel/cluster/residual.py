"""`Residual`: errors of constants on rows that they were not fitted to.

They are quantiles of log(measured / predicted).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

INTERVAL = (0.05, 0.5, 0.95)
"""Between the first and the last of these quantiles nine in ten lie."""
BIG = 2**20
"""From so many bytes on a collective counts as large."""
_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The quantiles `INTERVAL` of the logarithms of `rows` rows.

    Each row was judged by a fit that was made without it.
    """

    low: float
    middle: float
    high: float
    rows: int

    @classmethod
    def of(cls, logarithms: NDArray[np.float64]) -> Residual:
        """Return quantiles between which a further row lies with nine chances in ten.

        They are order statistics over n + 1.

        >>> Residual.of(np.linspace(-1, 1, 39))
        Residual(low=-0.9474, middle=0.0, high=0.9474, rows=39)
        """
        low, middle, high = (
            round(float(value), _DIGITS)
            for value in np.quantile(logarithms, INTERVAL, method="weibull")
        )
        return cls(low=low, middle=middle, high=high, rows=len(logarithms))


def left_by(kind: str, nbytes: float) -> str:
    """The key of a level's residuals of a kind of collective: large ones or the others.

    >>> left_by("all_reduce", 2**20), left_by("all_reduce", 1e6)
    ('all_reduce from 1 MiB', 'all_reduce below 1 MiB')
    """
    return f"{kind} {'from' if nbytes >= BIG else 'below'} 1 MiB"
