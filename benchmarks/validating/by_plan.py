"""Published runs of a folder as their rows define them, with the plans of free searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.api import plan_loaded
from autopar.costmodel import Cluster
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.planning.model.request import WITHOUT_LIMIT
from benchmarks.validating.known import Shape

from . import steps
from .configuration import Configuration
from .missing import Missing
from .priced import Priced, cluster_of_run, model_of_run, price
from .rows import Row, Run, read_tables, training_rows
from .training import stated_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Defined:
    """A run as a row defines it, with its price and the measured seconds of a step."""

    shape: Shape
    configuration: Configuration
    cluster: Cluster
    name: str
    priced: Priced
    measured: float | None

    def free_plan(self, seconds: float) -> Plan:
        """The best plan of its model, batch and devices for its framework, within CPU seconds."""
        c = self.configuration
        here = cluster_of_run(c, self.cluster, self.name)
        model = model_of_run(self.shape, c, self.cluster)
        return plan_loaded(model, cluster=here, memory=WITHOUT_LIMIT, seconds=seconds).plan


def defined(row: Row, run: Run) -> Defined | None:
    """The run of a row, with the likeliest of what it leaves open; None if it defines none."""
    seen: list[tuple[Configuration, Cluster, Priced]] = []

    def noting(shape: Shape, c: Configuration, cluster: Cluster, name: str) -> Priced:
        seen.append((c, cluster, price(shape, c, cluster, name)))
        return seen[-1][-1]

    try:
        shape, best = steps.predict(row, noting)
    except (AutoparError, Missing):
        return None
    c, cluster, _ = next(one for one in seen if one[-1] is best)
    return Defined(
        shape=shape,
        configuration=c,
        cluster=cluster,
        name=steps.framework(row).name,
        priced=best,
        measured=run.seconds or stated_seconds(run, shape),
    )


def rows_of(data: Path, groups: Sequence[str]) -> list[tuple[Row, Run]]:
    """The rows of training runs in a folder, of these groups alone if there are some."""
    tables, _ = read_tables(data)
    return [(row, run) for row, run in training_rows(tables) if not groups or run.group in groups]
