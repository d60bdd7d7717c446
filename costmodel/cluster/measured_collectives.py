"""`Measured`: seconds of a collective on real ranks, as a curve of two straight lines over bytes.

seconds(x) = alpha + beta * min(x, limit) + beta_above * max(x - limit, 0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import ClusterError

Line = tuple[float, float]  # seconds, seconds per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Two lines that meet at `limit` bytes (infinity: one line)."""

    alpha: float
    beta: float
    limit: float = math.inf
    beta_above: float = 0.0

    def seconds(self, nbytes: ArrayLike) -> NDArray[np.float64]:
        """The time of collectives of `nbytes`."""
        sizes = np.asarray(nbytes, dtype=np.float64)
        return np.asarray(
            self.alpha
            + self.beta * np.minimum(sizes, self.limit)
            + self.beta_above * np.maximum(sizes - self.limit, 0.0)
        )

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines whose minimum is the time; a curve that steepens has one line above it."""
        if self.limit == math.inf:
            return ((self.alpha, self.beta),)
        # A minimum of lines cannot steepen; the steeper line overestimates such a curve.
        if self.beta_above > self.beta:
            return ((self.alpha, self.beta_above),)
        return (
            (self.alpha, self.beta),
            (self.alpha + (self.beta - self.beta_above) * self.limit, self.beta_above),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One collective in groups of `group` on `level` (a text of `bind_axes`).

    `drivers`: devices that send at once through each unit's port. `residual`: mean relative
    difference between curve and measurement. `spread`: difference of the repeats at the worst size.
    """

    kind: str
    level: str
    group: int
    curve: Curve
    drivers: int = 1
    residual: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        figures = {
            "alpha": self.curve.alpha,
            "beta": self.curve.beta,
            "beta_above": self.curve.beta_above,
        }
        for name, value in {**figures, "residual": self.residual, "spread": self.spread}.items():
            if not 0 <= value < math.inf:
                raise ClusterError(
                    f"measured {self.kind} on {self.level!r}: {name} is {value}; it must be finite "
                    "and not negative"
                )
        if self.group < 2 or self.drivers < 1 or not self.curve.limit > 0:
            raise ClusterError(
                f"measured {self.kind} on {self.level!r}: group at least 2, drivers at least 1 and "
                "limit above 0 are needed"
            )

    def shared(self, factor: float) -> Measured:
        """Return the curve for ranks with `factor` times the host's memory bandwidth.

        The bandwidth changes the seconds of bytes, not of messages.
        """
        beta = self.curve.beta / factor
        above = self.curve.beta_above / factor
        return replace(self, curve=replace(self.curve, beta=beta, beta_above=above))
