"""Least squares in a box: Levenberg's steps with finite differences (Marquardt 1963), cut at the bounds.

    x' = x - (J'J + damping I)^-1 J'r      kept where the sum of squares falls, else the damping grows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP, STEPS = 1e-4, 60
GROWS, SHRINKS, LEAST, MOST = 4.0, 0.3, 1e-9, 1e9
"""Factors by which the damping grows and shrinks, and its range.

Without damping, constants that no measurement tells apart would leave no step.
"""
ENOUGH = 1e-10
"""The least relative fall of the sum of squares that is worth another step."""


def solve(residuals: Callable[[Mapping[str, float]], Floats], sides: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """The constants of least squared residuals; of each where the search starts, the least and the most.

    >>> found = solve(lambda at: np.array([at["a"] - 3.0, at["b"] - 9.0]), {"a": (1.0, 0.0, 5.0), "b": (1.0, 0.0, 5.0)})
    >>> round(found["a"], 6), round(found["b"], 6)
    (3.0, 5.0)
    """
    start, least, most = (np.array([side[i] for side in sides.values()]) for i in range(3))

    def at(x: Floats) -> Floats:
        return residuals(dict(zip(sides, (least + x * (most - least)).tolist(), strict=True)))

    x = (start - least) / (most - least)
    left, damping = at(x), 1e-2
    for _ in range(STEPS):
        inward = np.where(x > 0.5, -STEP, STEP)
        slopes = np.stack([(at(x + step) - left) / step[i] for i, step in enumerate(np.diag(inward))], axis=1)
        while damping < MOST:
            move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), slopes.T @ left)
            tried = np.clip(x - move, 0.0, 1.0)
            found = at(tried)
            if found @ found < left @ left:
                break
            damping *= GROWS
        else:
            break
        gained = 1 - (found @ found) / max(float(left @ left), 1e-300)
        x, left, damping = tried, found, max(damping * SHRINKS, LEAST)
        if gained < ENOUGH:
            break
    return dict(zip(sides, (least + x * (most - least)).tolist(), strict=True))
