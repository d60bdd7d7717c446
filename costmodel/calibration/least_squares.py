"""Least squares in a box: Levenberg's steps with finite differences, cut at the bounds.

    x' = x - (J'J + damping I)^-1 J'r

A step is kept where the sum of squares falls, else the damping grows (Marquardt 1963).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# The step of a finite difference, as a share of a constant's range, and the most iterations.
STEP = 1e-4
STEPS = 60
GROWS = 4.0
SHRINKS = 0.3
LEAST = 1e-9
MOST = 1e9
"""Factors by which the damping grows and shrinks, and its range.

Without damping, constants that no measurement tells apart would leave no step.
"""
ENOUGH = 1e-10
"""The least relative fall of the sum of squares that is worth another step."""


def solve(
    residuals: Callable[[Mapping[str, float]], Floats],
    sides: Mapping[str, tuple[float, float, float]],
) -> dict[str, float]:
    """Return the constants of least squared residuals.

    `sides`: for each constant its start, least and most.

    >>> sides = {"a": (1.0, 0.0, 5.0), "b": (1.0, 0.0, 5.0)}
    >>> best = solve(lambda at: np.array([at["a"] - 3.0, at["b"] - 9.0]), sides)
    >>> round(best["a"], 6), round(best["b"], 6)
    (3.0, 5.0)
    """
    start, least, most = (np.array([side[i] for side in sides.values()]) for i in range(3))

    def at(x: Floats) -> Floats:
        return residuals(dict(zip(sides, (least + x * (most - least)).tolist(), strict=True)))

    # On a scale from 0 (least) to 1 (most), so that one damping suits constants of any unit.
    x = (start - least) / (most - least)
    left = at(x)
    damping = 1e-2
    for _ in range(STEPS):
        # Differences step inward, so that no constant leaves its range.
        inward = np.where(x > 0.5, -STEP, STEP)
        slopes = np.stack(
            [(at(x + step) - left) / step[i] for i, step in enumerate(np.diag(inward))], axis=1
        )
        while damping < MOST:
            move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), slopes.T @ left)
            tried = np.clip(x - move, 0.0, 1.0)
            after = at(tried)
            if after @ after < left @ left:
                break
            damping *= GROWS
        else:
            break
        # The sum of squares may be exactly zero.
        gained = 1 - (after @ after) / max(float(left @ left), 1e-300)
        x = tried
        left = after
        damping = max(damping * SHRINKS, LEAST)
        if gained < ENOUGH:
            break
    return dict(zip(sides, (least + x * (most - least)).tolist(), strict=True))
