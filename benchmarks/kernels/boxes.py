"""The fitted constants: for each form their names, the starts of the search, and the bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.costmodel.device.attention import AttentionForm
from autopar.costmodel.device.grouped_products import GroupedForm
from autopar.costmodel.device.products import Clock, Library, ProductForm

Floats = NDArray[np.float64]

WARM = 2e-5
"""Seconds of repeated products after which a device is at its power limit.

Fitted on the H200, whose sustained rows show it most clearly. A device without sustained rows has
its burst constants with this one (B200 and GB200 agree within 6 %).
"""
DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Names of constants with (start, least, most) of each."""

    sides: Mapping[str, tuple[float, float, float]]

    def solve(
        self,
        residuals: Callable[[Mapping[str, float]], Floats],
        *,
        scale: float,
        starts: Sequence[Mapping[str, float]] = ({},),
        prior: float = 0.0,
        evaluations: int = 40,
    ) -> dict[str, float]:
        """The constants of least soft-L1 residuals over all starts.

        `prior` pulls each slightly to its start.
        """
        names = list(self.sides)
        start, least, most = (np.array([self.sides[name][i] for name in names]) for i in range(3))

        def constants(x: Floats) -> dict[str, float]:
            return dict(zip(names, (least + x * (most - least)).tolist(), strict=True))

        best: tuple[float, Floats] | None = None
        for given in starts:
            first = np.array(
                [given.get(name, value) for name, value in zip(names, start, strict=True)]
            )
            x0 = np.clip((first - least) / (most - least), 1e-3, 1 - 1e-3)

            def pulled(x: Floats, x0: Floats = x0) -> Floats:
                return np.concatenate([residuals(constants(x)), prior * (x - x0)])

            solution = least_squares(
                pulled,
                x0,
                bounds=(0, 1),
                loss="soft_l1",
                f_scale=scale,
                max_nfev=evaluations,
                diff_step=1e-3,
            )
            if best is None or solution.cost < best[0]:
                best = (float(solution.cost), solution.x)
        assert best is not None
        return {name: float(f"{value:.{DIGITS}g}") for name, value in constants(best[1]).items()}


CLOCK = {"rate": (0.75, 0.02, 1.3), "heat": (0.15, 0.0, 0.6), "warm": (1e-3, 1e-6, 1e-2)}
PRODUCT = Box(
    sides=CLOCK
    | {
        "square": (1.0, 0.3, 1.2),
        "whole": (0.97, 0.2, 1.1),
        "half": (0.85, 0.2, 1.1),
        "quarter": (0.66, 0.1, 1.1),
        "prologue": (18.0, 0.0, 1500.0),
        "epilogue": (45.0, 0.0, 480.0),
        "launch": (2.2e-6, 5e-7, 5e-6),
        "stream": (0.8, 0.2, 1.3),
        "cache": (4.3, 0.2, 50.0),
        "quantum": (0.1, 0.0, 1.0),
        "split": (4e-6, 0.0, 2e-5),
        "blend": (2.5, 1.0, 12.0),
    }
)
HELD = (2e6, 0.0, 1e8)
"""A constant of products, fitted only if memory is `SLOW` (B/s): with HBM it comes out as 0."""
SLOW = 2e12 / 1.2
LIBRARY = {
    "factor": (1.0, 0.6, 1.6),
    "passes": (2.0, 0.0, 25.0),
    "start": (1e-6, 0.0, 4e-5),
    "held": (4e6, 0.0, 2e8),
}
ATTENTION = Box(
    sides=CLOCK
    | {
        "rate": (0.6, 0.02, 0.95),
        "heat": (0.15, 0.0, 3.0),
        "start": (100.0, 0.0, 3000.0),
        "edge": (100.0, 0.0, 6000.0),
        "quantum": (0.5, 0.0, 1.5),
        "longest": (0.9, 0.2, 1.0),
        "grouped": (1.0, 0.7, 1.4),
        "launch": (8e-6, 1e-6, 1e-4),
        "passes": (1.0, 0.0, 30.0),
        "blend": (3.0, 1.0, 12.0),
        "held": (5e6, 0.0, 2e8),
    }
)
WIDTH = (0.8, 0.02, 2.5)
VERSION = (1.0, 0.4, 2.5)
GROUPED = Box(
    sides=CLOCK
    | {
        "rate": (0.9, 0.02, 1.15),
        "small": (0.5, 0.0, 2.0),
        "prologue": (100.0, 0.0, 4000.0),
        "quantum": (0.5, 0.0, 1.0),
        "stream": (0.8, 0.1, 1.3),
        "blend": (3.0, 1.0, 12.0),
        "passes": (2.0, 0.0, 30.0),
        "tokens": (2.0, 0.0, 60.0),
        "expert": (1e-7, 0.0, 5e-6),
        "others": (0.05, 0.0, 2.0),
        "uneven": (0.05, 0.0, 1.0),
        "launch": (2e-5, 1e-6, 3e-4),
    }
)


def clocks(
    constants: Mapping[str, float], sustained: Mapping[str, float] | None = None
) -> dict[str, Clock]:
    """Both clocks of a form.

    Without constants of its own the sustained one is the burst one, warm at once.
    """
    burst = Clock(**{name: constants[name] for name in CLOCK})
    if sustained:
        other = Clock(**sustained)
    else:
        other = Clock(rate=burst.rate, heat=burst.heat, warm=min(WARM, burst.warm))
    return {"burst": burst, "sustained": other}


def rest(constants: Mapping[str, float], box: Box) -> dict[str, float]:
    """The constants of a form, without its clocks."""
    return {name: constants[name] for name in box.sides if name not in CLOCK}


def product_form(
    constants: Mapping[str, float],
    libraries: Sequence[str],
    sustained: Mapping[str, float] | None = None,
) -> ProductForm:
    """The form with these constants; a library's are named "factor vllm"."""
    own = {
        library: Library(
            **{
                name: constants[f"{name} {library}"]
                for name in LIBRARY
                if f"{name} {library}" in constants
            }
        )
        for library in libraries
    }
    return ProductForm(
        **clocks(constants, sustained),
        **rest(constants, PRODUCT),
        held=constants.get("held", 0.0),
        libraries=own,
    )


def attention_form(
    constants: Mapping[str, float], widths: Sequence[int], versions: Sequence[str] = ()
) -> AttentionForm:
    """The form with these constants.

    Heads of 64 have "width 64", a version "version vllm 0.24.0".
    """
    return AttentionForm(
        **clocks(constants),
        **rest(constants, ATTENTION),
        widths={str(size): constants[f"width {size}"] for size in widths},
        versions={name: constants[f"version {name}"] for name in versions},
    )


def grouped_form(constants: Mapping[str, float]) -> GroupedForm:
    """The form of these constants."""
    return GroupedForm(**clocks(constants), **rest(constants, GROUPED))
