"""Seconds of the host for each action, by least squares over steps of small trainings.

    min over h >= 0 of  sum over trainings of (step(h) / measured - 1)^2

The price of a step is a line in h but for what hides under other work, so the line is drawn anew at
the last solution, some rounds long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.device.host_actions import HOST_ACTIONS

from .collective_curves import agreed, nonnegative_solution

Floats = NDArray[np.float64]
Price = Callable[[Mapping[str, float]], Sequence[float]]
"""The seconds of a step of each training, by those of the host for each action."""

ROUNDS = 4
SLOPE = 1e-5
"""Seconds by which a figure is raised to see how often a step has its action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Seconds by action, and a sentence on what they come from."""

    seconds: Mapping[str, float]
    source: str


def fit_host(price: Price, repeats: Sequence[Sequence[float]]) -> HostFit:
    """The seconds of `HOST_ACTIONS` by which trainings are priced as they were measured.

    `repeats`: of a step of each training.
    """
    measured = np.array([agreed(times) for times in repeats])
    solution = np.zeros(len(HOST_ACTIONS))
    for _ in range(ROUNDS):
        steps = _priced(price, solution)
        each = np.eye(len(solution)) * SLOPE
        counts = np.array([(_priced(price, solution + more) - steps) / SLOPE for more in each]).T
        solution = nonnegative_solution(
            counts / measured[:, None], 1 - (steps - counts @ solution) / measured
        )
    left = np.abs(_priced(price, solution) / measured - 1)
    seconds = {
        action: float(f"{value:.4g}") for action, value in zip(HOST_ACTIONS, solution, strict=True)
    }
    return HostFit(
        seconds=seconds,
        source=f"measured: steps of {len(measured)} small trainings, of which the fit leaves a "
        f"mean error of {left.mean():.1%}, {left.max():.1%} at most",
    )


def _priced(price: Price, seconds: Floats) -> Floats:
    """The seconds of each training's step."""
    return np.array(price(dict(zip(HOST_ACTIONS, seconds.tolist(), strict=True))))
