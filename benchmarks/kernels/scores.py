"""The errors on a table of measured rows: `Score`, the same for kernels and for collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

Floats = NDArray[np.float64]

HEADINGS = ("n", "median", "90 %", "bias", "within 10 %", "inside", "as planned", "not priced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of predicted over measured seconds, as fractions, of rows that no fit saw.

    `inside`: the share in the stated intervals, which should be nine in ten. `planned_median`: of a
    plan's prices, which do not know a row's library.
    """

    device: str
    kind: str
    n: int
    median: float
    p90: float
    bias: float
    within_10: float
    inside: float
    planned_median: float
    not_priced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Predicted seconds of rows; NaN: not priced.

    `planned` is the price in a plan; its intervals reach from `low` to `high`, as multiples.
    """

    predicted: Floats
    planned: Floats
    low: Floats
    high: Floats

    def part(self, mask: NDArray[np.bool_]) -> Prices:
        """The prices of the rows in `mask`."""
        return Prices(
            predicted=self.predicted[mask],
            planned=self.planned[mask],
            low=self.low[mask],
            high=self.high[mask],
        )


def scored(device: str, kind: str, seconds: Floats, prices: Prices) -> Score:
    """The score of rows with a prediction."""
    known = np.isfinite(prices.predicted)
    priced = prices.part(known)
    measured = seconds[known]
    error = priced.predicted / measured - 1
    planned_error = priced.planned / measured - 1
    size = np.abs(error)
    ratio = measured / priced.planned
    return Score(
        device=device,
        kind=kind,
        n=int(known.sum()),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        bias=float(np.median(error)),
        within_10=float((size <= 0.1).mean()),
        inside=float(((priced.low <= ratio) & (ratio <= priced.high)).mean()),
        planned_median=float(np.median(np.abs(planned_error))),
        not_priced=int((~known).sum()),
    )


def held_in(scores: Iterable[Score]) -> float:
    """The share of all rows in their intervals."""
    counted = [(one.inside, one.n) for one in scores]
    return sum(inside * n for inside, n in counted) / max(sum(n for _, n in counted), 1)


def shown(title: str, scores: Sequence[Score]) -> None:
    """Print a table of scores."""
    table = Table(
        title=title,
        caption=(
            f"{held_in(scores):.1%} of {sum(one.n for one in scores)} rows lie inside the stated "
            "90 % intervals"
        ),
    )
    table.add_column("device", no_wrap=True)
    table.add_column("kernels", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for one in scores:
        figures = (
            f"{one.within_10:.0%}",
            f"{one.inside:.0%}",
            f"{one.planned_median:.1%}",
            str(one.not_priced or "-"),
        )
        table.add_row(
            one.device,
            one.kind,
            str(one.n),
            f"{one.median:.1%}",
            f"{one.p90:.1%}",
            f"{one.bias:+.1%}",
            *figures,
        )
    Console(width=max(Console().width, 130), highlight=False).print(table)
