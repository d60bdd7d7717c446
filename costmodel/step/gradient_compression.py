"""Formats for gradients: those that save most time within a budget of relative error.

The relative error of a gradient of N elements, whose parameters i have N_i of them, is taken to be

    E^2 = sum_i N_i e_i^2 / N
    e   = 2^-9 (bfloat16), 2^-12 (float16),
          or sqrt(1 - r / k) (factors of rank r of a matrix of rank k)

The last holds for the flattest spectrum, the worst case. From exact gradients, the step that saves
most seconds per added E^2 is taken again and again, as long as E stays within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir import DTYPE_BYTES
from autopar.sharding.gradient_formats import rank_of

# Half of the largest relative error of rounding, which is 2^-(bits of the mantissa + 1).
ROUNDING = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-12, "bfloat16": 2.0**-9}
OFFERED = ("bfloat16", *(f"powersgd-{2**power}" for power in range(10)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A parameter's gradient in its sum: shape and type.

    `seconds`: those of a message as a function of its bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    seconds: Callable[[float], float]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, form: str | None) -> tuple[float, float]:
        """Seconds and squared relative error in a format (None: the gradient's own type)."""
        if form is None:
            return self.seconds(self.size * DTYPE_BYTES[self.dtype]), 0.0
        rank = rank_of(form, self.shape)
        if rank:
            rows = self.shape[0]
            columns = math.prod(self.shape[1:])
            nbytes = rank * (rows + columns) * DTYPE_BYTES[self.dtype]
            return self.seconds(nbytes), max(1 - rank / min(rows, columns), 0.0)
        # A vector has no factors of low rank: it stays in its own type.
        if form not in ROUNDING:
            return self.of(None)
        return self.seconds(self.size * DTYPE_BYTES[form]), max(
            ROUNDING[form] ** 2 - ROUNDING[self.dtype] ** 2, 0.0
        )


def chosen_formats(gradients: Mapping[str, Gradient], budget: float) -> dict[str, str]:
    """Return the new formats of parameters, for a relative error up to `budget`.

    Parameters that keep the format that they have are left out.
    """
    total = sum(gradient.size for gradient in gradients.values())
    steps: list[tuple[float, str, str, float]] = []
    for name, gradient in gradients.items():
        whole, _ = gradient.of(None)
        for form in OFFERED:
            seconds, error = gradient.of(form)
            if seconds < whole:
                # A format without any error comes first, and takes nothing of the budget.
                added = max(error * gradient.size / max(total, 1), 1e-300)
                steps.append(((whole - seconds) / added, name, form, added))
    formats: dict[str, str] = {}
    spent = 0.0
    # Equal gains are ordered by name, so that the choice is always the same.
    for _, name, form, added in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if name not in formats and spent + added <= budget**2:
            formats[name] = form
            spent += added
    return formats
