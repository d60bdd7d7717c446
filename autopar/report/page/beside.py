"""The report's comparison of a measured step with the predicted one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autopar.analysis.measurements.measured_steps import Measured
from autopar.analysis.program.exchanges import Issued
from autopar.analysis.program.strategy_words import COLLECTIVES
from autopar.costmodel import Cluster
from autopar.plan import Plan
from autopar.report.certainty import step_around
from autopar.report.tables import Table
from autopar.units import seconds_text

from .drawing import Bar, bars
from .section import Section

NAMES = ("part of a step", ">predicted", ">measured", ">measured / predicted")


def beside(
    plan: Plan, measured: Measured, issued: Sequence[Issued], cluster: Cluster | None
) -> Section:
    """The section of the comparison; `issued`: the priced collectives of a step."""
    p = plan.predicted
    told = [measured.source + "."]
    interval: tuple[float, float] | None = None
    if cluster is not None:
        around = step_around(plan, cluster)
        interval = (p.step * around.low, p.step * around.high)
        inside = "within" if interval[0] <= measured.step <= interval[1] else "outside"
        told.append(
            f"The measured step is {inside} the interval that nine runs in ten should keep to."
        )
    rows = tuple(_rows(plan, measured, issued))
    drawn = bars(
        [
            Bar(
                name="predicted",
                parts=(("step", p.step, seconds_text(p.step)),),
                text=seconds_text(p.step),
                interval=interval,
            ),
            Bar(
                name="measured",
                parts=(("step", measured.step, seconds_text(measured.step)),),
                text=seconds_text(measured.step),
            ),
        ],
        "The step as predicted, with its interval, and as measured",
        alike=True,
    )
    table = Table(title="Measured beside predicted", columns=NAMES, rows=rows)
    return Section(
        anchor="measured",
        title="Measured beside predicted",
        told=tuple(told),
        pictures=(drawn,),
        tables=(table,),
    )


def _rows(
    plan: Plan, measured: Measured, issued: Sequence[Issued]
) -> Iterator[tuple[str, str, str, str]]:
    """The rows of the table: what was predicted beside what was measured, as far as it was."""
    p = plan.predicted
    yield _row("step", p.step, measured.step)
    if measured.computing is not None:
        yield _row(
            "computing (forward, backward, update)",
            p.forward + p.backward + p.update,
            measured.computing,
        )
    if measured.exposed is not None:
        yield _row(
            "communication that nothing hides",
            max(p.communication - p.overlapped, 0.0),
            measured.exposed,
        )
    kinds: dict[str, float] = defaultdict(float)
    for one in issued:
        kinds[one.kind] += one.seconds
    for kind in sorted({*kinds, *measured.kinds} if measured.kinds else ()):
        yield _row(
            f"{COLLECTIVES.get(kind, kind)}, hidden or not",
            kinds.get(kind, 0.0),
            measured.kinds.get(kind, 0.0),
        )


def _row(name: str, predicted: float, measured: float) -> tuple[str, str, str, str]:
    ratio = f"{measured / predicted:.2f}x" if predicted > 0 else ""
    return name, seconds_text(predicted), seconds_text(measured), ratio
