"""Races of dynamic programming and a rival on the same tables: CPU seconds and objectives."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from autopar.search import (
    CostGraph,
    NotSolved,
    Solution,
    exhaustive,
    forget_orders,
    integer_program,
    recursive_programming,
    solve,
)

EQUAL = 1e-6
"""Relative distance of costs that are equal: HiGHS works to about that."""
ENUMERABLE = 10**7
COLUMNS = 4 * 10**6
"""Columns of an integer program that memory has room for."""
BRIEF = 0.05
"""Seconds of CPU up to which a search of ours is run again: a clock may tick every 0.004."""
RUNS = 9
"""The most runs of a brief search."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One race: seconds of CPU, costs in seconds a step.

    `note`: the rival's failure; `rival_bound`: its proof.
    """

    model: str
    mesh: str
    rival: str
    ours_s: float
    rival_s: float | None
    ours_cost: float
    rival_cost: float | None
    ours_gap: float
    rival_bound: float | None = None
    note: str = ""

    @property
    def axes(self) -> int:
        """The axes of the mesh."""
        return self.mesh.count("x") + 1

    @property
    def ratio(self) -> float | None:
        """The rival's seconds over ours."""
        return None if self.rival_s is None else self.rival_s / max(self.ours_s, 1e-9)

    @property
    def excess(self) -> float | None:
        """The rival's excess cost, as a share of ours."""
        return None if self.rival_cost is None else self.rival_cost / self.ours_cost - 1.0

    @property
    def verdict(self) -> str:
        """Ours against the rival's objective."""
        if self.rival_cost is None:
            return "-"
        difference = (self.ours_cost - self.rival_cost) / abs(self.rival_cost)
        return "equal" if abs(difference) <= EQUAL else f"{difference:+.2%}"

    def as_json(self) -> dict[str, Any]:
        """The row with its ratio, excess and verdict."""
        return {**asdict(self), "ratio": self.ratio, "excess": self.excess, "verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A model that could not be read (no `mesh`), or a mesh that could not be laid or searched."""

    model: str
    mesh: str
    why: str


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds and the result, without the garbage collector, which scans the whole process."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        result = work()
        return time.process_time() - start, result
    finally:
        gc.enable()


def averaged(search: Callable[[CostGraph], T], graph: CostGraph) -> tuple[float, T]:
    """CPU seconds of a search from a cold start, the mean of some runs if it is brief.

    Each run has a graph of its own, so that nothing is known of its tables.
    """
    forget_orders()
    seconds, result = timed(partial(search, replace(graph)))
    spent = [seconds]
    while sum(spent) < BRIEF and len(spent) < RUNS:
        forget_orders()
        spent.append(timed(partial(search, replace(graph)))[0])
    return sum(spent) / len(spent), result


def race(
    model: str, mesh: str, graph: CostGraph, *, seconds: float, rivals: Iterable[str]
) -> list[Row]:
    """A row for each rival; ours starts cold."""
    ours_s, ours = averaged(solve, graph)
    return [RIVALS[rival](model, mesh, graph, ours_s, ours, seconds) for rival in rivals]


def _row(
    model: str, mesh: str, rival: str, ours_s: float, ours: Solution, **rival_figures: Any
) -> Row:
    return Row(
        model=model,
        mesh=mesh,
        rival=rival,
        ours_s=ours_s,
        ours_cost=ours.cost,
        ours_gap=ours.gap,
        **rival_figures,
    )


def against_highs(
    model: str, mesh: str, graph: CostGraph, ours_s: float, ours: Solution, seconds: float
) -> Row:
    """The integer program, limited to `seconds`."""
    columns = sum(graph.sizes) + sum(table.size for table in graph.edges.values())
    if columns > COLUMNS:
        note = f"{columns:.1e} columns are too many"
        return _row(model, mesh, "highs", ours_s, ours, rival_s=None, rival_cost=None, note=note)
    spent, solution = timed(partial(_integer_program, graph, seconds))
    bound = solution.lower_bound if math.isfinite(solution.lower_bound) else None
    if isinstance(solution, NotSolved):
        return _row(
            model,
            mesh,
            "highs",
            ours_s,
            ours,
            rival_s=spent,
            rival_cost=None,
            rival_bound=bound,
            note="out of time",
        )
    note = "out of time" if solution.gap > EQUAL else ""
    return _row(
        model,
        mesh,
        "highs",
        ours_s,
        ours,
        rival_s=spent,
        rival_cost=solution.cost,
        rival_bound=bound,
        note=note,
    )


def _integer_program(graph: CostGraph, seconds: float) -> Solution | NotSolved:
    """The solution, or the bounds known when the time was up."""
    try:
        return integer_program(graph, time_limit=seconds)
    except NotSolved as error:
        return error


def against_exhaustive(
    model: str, mesh: str, graph: CostGraph, ours_s: float, ours: Solution, seconds: float
) -> Row:
    """Every assignment, where there are few."""
    if math.prod(graph.sizes) > ENUMERABLE:
        note = f"10^{sum(map(math.log10, graph.sizes)):.0f} assignments are too many"
        return _row(
            model, mesh, "exhaustive", ours_s, ours, rival_s=None, rival_cost=None, note=note
        )
    spent, solution = timed(lambda: exhaustive(graph))
    return _row(
        model,
        mesh,
        "exhaustive",
        ours_s,
        ours,
        rival_s=spent,
        rival_cost=solution.cost,
        rival_bound=solution.cost,
    )


def against_recursive(
    model: str, mesh: str, graph: CostGraph, ours_s: float, ours: Solution, seconds: float
) -> Row:
    """The near-linear search, from a cold start, too."""
    spent, solution = averaged(recursive_programming, graph)
    row = _row(
        model,
        mesh,
        "recursive_programming",
        ours_s,
        ours,
        rival_s=spent,
        rival_cost=solution.cost,
        rival_bound=solution.lower_bound,
    )
    faster = ours_s / max(spent, 1e-9)
    return replace(row, note=f"{faster:.1f} times as fast, {row.excess:.4%} above ours")


RIVALS: dict[str, Callable[[str, str, CostGraph, float, Solution, float], Row]] = {
    "highs": against_highs,
    "exhaustive": against_exhaustive,
    "recursive_programming": against_recursive,
}
