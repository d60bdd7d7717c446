"""Curves of the best plan's step over devices, link speed, batch and memory.

Each quantity is scaled alone, and the model planned again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import NoPlanFits, UsageError
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import Request
from autopar.planning.remembered_plans import Searches
from autopar.schemes import scheme_of
from autopar.units import bytes_text, rate_text

from .sensitivity import Sensitivity, scaled_links
from .side_by_side import side_by_side

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A quantity times `factor` (in words `value`), and the best plan there.

    `seconds`: of its step (None: `named` is the reason why there is no plan). `batch`: samples of a
    step. `devices`: of the plan.
    """

    factor: float
    value: str
    step: float | None
    named: str
    batch: int
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The points of a quantity by factor."""

    quantity: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """The conditions of the plan at a point."""

    quantity: str
    factor: float
    value: str
    request: Request
    batch: int


def curves(held: Sensitivity, progress: Progress | None = None) -> list[Curve]:
    """A curve for every quantity of the cluster and of the model."""
    tasks = list(_tasks(held))
    # Read here, as that may need more than processes beside one another may do.
    searches = {task.batch: _searches(held, task.batch) for task in tasks}

    def planned(task: _Task) -> tuple[str, float | None]:
        return _planned(searches[task.batch], task.request)

    points_of: dict[str, list[Point]] = {}
    results = side_by_side(planned, tasks)
    for number, (task, (named, step)) in enumerate(zip(tasks, results, strict=True), start=1):
        point = Point(
            factor=task.factor,
            value=task.value,
            step=step,
            named=named,
            batch=task.batch,
            devices=task.request.cluster.devices,
        )
        points_of.setdefault(task.quantity, []).append(point)
        if progress:
            progress(number, len(tasks), f"{task.quantity} x {task.factor:g}")
    return [
        Curve(quantity=quantity, points=tuple(points)) for quantity, points in points_of.items()
    ]


def _tasks(held: Sensitivity) -> Iterator[_Task]:
    """The tasks of every quantity at every possible factor."""
    request = held.request
    batch = held.batch
    cluster = request.cluster
    for factor, number in _whole(cluster.devices) if not cluster.joined else ():
        sized = replace(request, cluster=cluster.sized(number))
        yield _Task(
            quantity="devices", factor=factor, value=str(number), request=sized, batch=batch
        )
    for level in cluster.levels:
        for factor in FACTORS if level.size > 1 else ():
            scaled = scaled_links(cluster, level.name, factor)
            value = rate_text(level.bandwidth * factor, "B/s")
            named = f"bandwidth of {level.name}"
            yield _Task(
                quantity=named,
                factor=factor,
                value=value,
                request=replace(request, cluster=scaled),
                batch=batch,
            )
    for factor, number in _whole(batch) if held.batches is not None else ():
        yield _Task(
            quantity="batch", factor=factor, value=str(number), request=request, batch=number
        )
    for factor in FACTORS:
        room = request.memory_limit * factor
        yield _Task(
            quantity="memory",
            factor=factor,
            value=bytes_text(room),
            request=replace(request, memory=room),
            batch=batch,
        )


def _whole(number: int) -> list[tuple[float, int]]:
    """The factors with whole products, and these products."""
    return [
        (factor, int(number * factor))
        for factor in FACTORS
        if number * factor >= 1 and (number * factor).is_integer()
    ]


def _searches(held: Sensitivity, batch: int) -> Searches | str:
    """The searches of the model with a batch, or the reason why it cannot have that."""
    if batch == held.batch or held.batches is None:
        return held.searches
    try:
        return Searches(held.batches(batch), held.request)
    except UsageError as error:
        return str(error)


def _planned(searches: Searches | str, request: Request) -> tuple[str, float | None]:
    """The name and the seconds of the best plan."""
    if isinstance(searches, str):
        return f"no plan: {searches}", None
    try:
        plan = searches.plan(request)
    except NoPlanFits:
        return "no plan fits", None
    except UsageError as error:
        return f"no plan: {error}", None
    return scheme_of(plan, searches.folded.analysis(short=False)).called, plan.predicted.step
