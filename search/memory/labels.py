"""The gap closer: labels enumerate all assignments within the duality gap.

    excess(c) = (sum of the tables that v was eliminated from)[c, x_N(v)] - m_v[x_N(v)]  >=  0

The search walks the steps of an elimination at price p backwards, from the last one. A choice c of
v raises the priced optimum by excess(c). An assignment within the limit that beats the best known
one has a total excess below the gap, best - (L(p) - p * limit). A label is a partial assignment. Of
two labels that agree on all open variables (those that later steps still read), one that costs more
and needs no less memory is dropped. The search is exact unless a label is dropped for lack of room;
the least excess dropped then bounds the missed assignments. Labels with dominance are as in
resource-constrained shortest paths (M. Desrochers and F. Soumis, INFOR 26, 1988), here over the
tree of an elimination.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..costgraph import CostGraph, memory_tables
from ..elimination.schedules import Schedule, Step
from ..tables import Indices, Table

PRESELECTED = 4
"""Times `room`: labels that are compared for dominance."""
MAX_CODE = 1 << 62
"""The largest number that stands for the choices of several columns."""
ROOMS = (128, 1024)
"""Labels kept in each pass: an assignment of the first pass narrows the gap of the second."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Frontier:
    """The live labels, with a column of choices for each open variable, excess and memory.

    `history`: for each step its variable and, by label, the parent label and the choice. `dropped`:
    the least excess of a label that was dropped for lack of room.
    """

    columns: dict[int, Indices]
    excess: Table
    memory: Table
    history: list[tuple[int, Indices, Indices]]
    dropped: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """An elimination at the dual's price of a byte: its schedule and the tables of its joins."""

    plan: Schedule
    tables: Sequence[Table]
    price: float


def label_search(
    graph: CostGraph, priced: Priced, *, limit: float, gap: float, room: int
) -> tuple[list[int] | None, float]:
    """Return the best assignment with an excess below `gap`, or None.

    The second value is a bound of all assignments that were not reached. `limit`: bytes. `room`:
    labels kept after each step.
    """
    plan = priced.plan
    tables = priced.tables
    price = priced.price
    memory = memory_tables(graph)
    optimum = plan.optimum(tables)
    # Sums in another order differ by rounding; the margin keeps an optimum from being lost to it.
    allowed = gap * (1.0 + 1e-9) + 1e-12 * abs(optimum)
    # A label must leave at least the least memory of the variables that follow.
    # That alone rules out most labels near a tight limit, without a look at their cost.
    remaining = math.fsum(float(table.min()) for table in memory)
    steps = _depth_first(plan)
    last_use = {u: i for i, step in enumerate(steps) for u in step.neighbours}
    front = _Frontier(columns={}, excess=np.zeros(1), memory=np.zeros(1), history=[])
    for i, step in enumerate(steps):
        own = memory[step.variable]
        remaining -= float(own.min())
        _extend(front, step, _excess(plan, tables, step, front), own, (allowed, limit - remaining))
        # Of a variable that no later step reads, the choice no longer matters: labels that differ
        # only there become comparable.
        for u in [u for u in front.columns if last_use.get(u, -1) <= i]:
            del front.columns[u]
        # Dominance sorts the labels, so the hopeless ones go before it.
        _limit(front, PRESELECTED * room)
        _select(front, _undominated(front, graph.sizes, price))
        _limit(front, room)
    excluded = optimum + front.dropped - price * limit
    fits = np.flatnonzero(front.memory <= limit)
    if not len(fits):
        return None, excluded
    best = int(fits[(front.excess - price * front.memory)[fits].argmin()])
    return _trace(front, best, len(graph.sizes)), excluded


def _depth_first(plan: Schedule) -> list[Step]:
    """Return the steps, each after those of its neighbours, one subtree after another.

    The subtrees are those of the elimination tree; this order keeps few columns open at once.
    """
    position = {step.variable: i for i, step in enumerate(plan.steps)}
    children: list[list[int]] = [[] for _ in plan.steps]
    stack: list[int] = []
    for i, step in enumerate(plan.steps):
        above = min((position[u] for u in step.neighbours), default=None)
        (stack if above is None else children[above]).append(i)
    order = []
    while stack:
        i = stack.pop()
        order.append(plan.steps[i])
        stack.extend(children[i])
    return order


def _excess(plan: Schedule, tables: Sequence[Table], step: Step, front: _Frontier) -> Table:
    """The excess that each choice (column) adds to each label (row)."""
    join = plan.joins[step.join]
    total = np.zeros((len(front.excess), join.size))
    # The same sum as in the elimination, but only at the labels' choices of the neighbours: the
    # whole table over all neighbours was never kept.
    for labels, table in join.inputs:
        others = [i for i, label in enumerate(labels) if label]
        around = tuple(front.columns[step.neighbours[labels[i] - 1]] for i in others)
        total += _rows(tables[table].transpose([*others, labels.index(0)]), around)
    message = tables[len(plan.costs) + step.join][tuple(front.columns[u] for u in step.neighbours)]
    # The message is the least of these sums; rounding alone could make a difference negative.
    return np.maximum(total - np.reshape(message, (-1, 1)), 0.0)


def _rows(table: Table, around: tuple[Indices, ...]) -> Table:
    """The rows of `table` (own choices last) at the labels' columns."""
    return table[around] if around else table


def _extend(
    front: _Frontier, step: Step, excess: Table, memory: Table, bounds: tuple[float, float]
) -> None:
    """Extend each label by every choice of `step.variable` within `bounds`, of excess and bytes."""
    excess = front.excess[:, None] + excess
    used = front.memory[:, None] + memory
    parents, choices = np.nonzero((excess <= bounds[0]) & (used <= bounds[1]))
    front.history.append((step.variable, parents, choices))
    front.columns = {u: column[parents] for u, column in front.columns.items()}
    front.columns[step.variable] = choices
    front.excess = excess[parents, choices]
    front.memory = used[parents, choices]


def _select(front: _Frontier, chosen: Indices) -> None:
    """Keep only the labels `chosen`."""
    variable, parents, choices = front.history[-1]
    front.history[-1] = (variable, parents[chosen], choices[chosen])
    front.columns = {u: column[chosen] for u, column in front.columns.items()}
    front.excess = front.excess[chosen]
    front.memory = front.memory[chosen]


def _limit(front: _Frontier, room: int) -> None:
    """Drop the labels of most excess until `room` are left."""
    if len(front.excess) <= room:
        return
    # Stable, so that of labels with equal excess the first ones stay on every machine.
    ranking = np.argsort(front.excess, kind="stable")
    front.dropped = min(front.dropped, float(front.excess[ranking[room]]))
    _select(front, np.sort(ranking[:room]))


def _undominated(front: _Frontier, sizes: Sequence[int], price: float) -> Indices:
    """Return the labels that no other one of equal columns dominates, in their old order.

    Dominance is in cost and memory.
    """
    count = len(front.excess)
    if count == 1:
        return np.zeros(1, dtype=np.int64)
    # One number for the choices of all columns; it is renumbered before it would overflow.
    group = np.zeros(count, dtype=np.int64)
    groups = 1
    for u, column in front.columns.items():
        if groups * sizes[u] > MAX_CODE:
            group = np.unique(group, return_inverse=True)[1].reshape(-1)
            groups = count
        group = group * sizes[u] + column
        groups = groups * sizes[u]
    group = np.unique(group, return_inverse=True)[1].reshape(-1)
    rank = np.unique(front.excess - price * front.memory, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((rank, front.memory, group))
    # By group, then memory: a label stays if its rank is below all before it. The offset makes each
    # group start anew.
    key = rank[order] - group[order] * (count + 1)
    undominated = np.ones(count, dtype=bool)
    undominated[1:] = key[1:] < np.minimum.accumulate(key)[:-1]
    return np.sort(order[undominated])


def _trace(front: _Frontier, label: int, count: int) -> list[int]:
    choices = [0] * count
    for variable, parents, chosen in reversed(front.history):
        choices[variable] = int(chosen[label])
        label = int(parents[label])
    return choices
