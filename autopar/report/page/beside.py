"""The report's comparison of a measured step with the predicted one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autopar.costmodel import Cluster
from autopar.costmodel.intervals import step_interval

from ...plan import Plan
from ..measured import Measured
from ..tables import Table
from ..units import seconds_text
from ..words import COLLECTIVES
from .drawing import Bar, bars
from .exchanges import Issued
from .section import Section

NAMES = ("part of a step", ">predicted", ">measured", ">measured / predicted")


def beside(plan: Plan, found: Measured, issued: Sequence[Issued], cluster: Cluster | None) -> Section:
    """The section of the comparison; `issued`: the priced collectives of a step."""
    p = plan.predicted
    told = [found.source + "."]
    interval: tuple[float, float] | None = None
    if cluster is not None:
        around = step_interval(cluster)
        interval = (p.step * around.low, p.step * around.high)
        inside = "within" if interval[0] <= found.step <= interval[1] else "outside"
        told.append(f"The measured step is {inside} the interval that nine runs in ten should keep to.")
    rows = tuple(_rows(plan, found, issued))
    drawn = bars(
        [
            Bar(name="predicted", parts=(("step", p.step, seconds_text(p.step)),), text=seconds_text(p.step), interval=interval),
            Bar(name="measured", parts=(("step", found.step, seconds_text(found.step)),), text=seconds_text(found.step)),
        ],
        "The step as predicted, with its interval, and as measured", alike=True,
    )  # fmt: skip
    table = Table(title="Measured beside predicted", columns=NAMES, rows=rows)
    return Section(anchor="measured", title="Measured beside predicted", told=tuple(told), pictures=(drawn,), tables=(table,))


def _rows(plan: Plan, found: Measured, issued: Sequence[Issued]) -> Iterator[tuple[str, str, str, str]]:
    p = plan.predicted
    yield _row("step", p.step, found.step)
    if found.computing is not None:
        yield _row("computing (forward, backward, update)", p.forward + p.backward + p.update, found.computing)
    if found.exposed is not None:
        yield _row("communication that nothing hides", max(p.communication - p.overlapped, 0.0), found.exposed)
    kinds: dict[str, float] = defaultdict(float)
    for one in issued:
        kinds[one.kind] += one.seconds
    for kind in sorted({*kinds, *found.kinds} if found.kinds else ()):
        yield _row(f"{COLLECTIVES.get(kind, kind)}, hidden or not", kinds.get(kind, 0.0), found.kinds.get(kind, 0.0))


def _row(name: str, predicted: float, measured: float) -> tuple[str, str, str, str]:
    ratio = f"{measured / predicted:.2f}x" if predicted > 0 else ""
    return name, seconds_text(predicted), seconds_text(measured), ratio
