"""Min-marginals: they rule out choices that are in no assignment cheaper than the incumbent.

After an elimination, a second pass from the last variable to the first gives every clique the least
cost outside it:

    inside_v        =  sum of the tables of v's clique + down_v[x_N(v)]
    down_u[x_N(u)]  =  min over the clique of v of inside_v  -  m_u[x_N(u)]
    marginal_v[c]   =  min over the clique of v, x_v = c, of inside_v

m_u is each message that v's elimination took. marginal_v[c] is the least sum of all assignments
with x_v = c. So c is ruled out if its marginal reaches the best known cost (with a limit: plus
price * limit). If variables were split to keep tables narrow, the marginals are lower bounds, and
moving a variable's unary table between its copies, towards equal marginals, raises the bound:

    share_i[c]  <-  share_i[c] - step * (marginal_i[c] - mean over the copies of marginal[c])

Sources: variable fixing by reduced costs, a standard of integer programming; min-marginals, V.
Kolmogorov, Convergent Tree-Reweighted Message Passing, IEEE PAMI 28 (2006).
"""

import math
from collections.abc import Sequence

import numpy as np

from autopar.compiled.elimination import Labels

from ..tables import Indices, Table
from .conditioning import Minimiser
from .join import merge
from .schedules import Schedule

BLOCK = 1 << 15
"""Entries of a clique that are summed together."""
ROUNDING = 1e-12
"""Relative distance of costs that are equal but for rounding."""


def marginals(plan: Schedule, tables: Sequence[Table]) -> list[Table]:
    """The least sum of all assignments that contain a choice, for each variable's choices."""
    optimum = plan.optimum(tables)
    # `made`: the join of each message, by the number of its factor; `down`: the least cost outside
    # of each message.
    least_sums: list[Table] = [np.zeros(0)] * sum(len(joins) for _, joins in plan.rounds)
    made = {
        int(factor): join
        for step, joins in plan.rounds
        for factor, join in zip(step.outputs, joins, strict=True)
    }
    first = len(plan.costs)
    down: dict[int, Table] = {}
    for step, joins in reversed(plan.rounds):
        for member, join in enumerate(joins):
            factor = int(step.outputs[member])
            outside = down.pop(factor, None)
            if outside is None:
                # The last variable of a component: outside it are the optima of the other
                # components.
                outside = np.asarray(optimum - float(tables[first + join]))
            inner = [
                (int(number), labels, tables[first + made[int(number)]])
                for number, labels in zip(step.inputs[member], step.labels, strict=True)
                if int(number) in made
            ]
            terms = [(labels, tables[table]) for labels, table in plan.joins[join].inputs]
            terms.append((tuple(range(1, outside.ndim + 1)), outside))
            shape = (plan.joins[join].size, *plan.joins[join].shape)
            own, *beyond = _least(terms, shape, [(0,), *(labels for _, labels, _ in inner)])
            least_sums[int(step.variables[member])] = own
            for (number, _, message), least in zip(inner, beyond, strict=True):
                with np.errstate(invalid="ignore"):
                    difference = least - message  # infinity minus infinity: forbidden either way
                down[number] = np.where(np.isnan(difference), np.inf, difference)
    return least_sums


def survivors(solver: Minimiser, least: Sequence[Table], most: float) -> list[Indices] | None:
    """The choices with marginals below `most`, by variable of the solver's graph.

    None if a variable has no such choice: then no assignment costs less than `most`.
    """
    alive = [np.ones(size, dtype=bool) for size in solver.graph.sizes]
    # A choice as dear as the known assignment is of no use, and may seem cheaper by rounding alone.
    roof = most - ROUNDING * abs(most)
    for origin, table in zip(solver.origins, least, strict=True):
        # Each copy's marginal is a bound of its own, so one of them is enough to rule out a choice.
        alive[origin] &= table < roof
    return [np.flatnonzero(mask) for mask in alive] if all(mask.any() for mask in alive) else None


def _least(
    terms: Sequence[tuple[Labels, Table]], shape: tuple[int, ...], wanted: Sequence[Labels]
) -> list[Table]:
    """Sum the terms over a clique of that shape, and minimise onto each of the wanted labels."""
    laid = merge(terms, len(shape))
    results = [np.full([shape[label] for label in sorted(labels)], np.inf) for labels in wanted]
    drops = [tuple(axis for axis in range(len(shape)) if axis not in labels) for labels in wanted]
    # The sum over a whole clique would not fit a cache, and mostly no memory.
    for window in _windows(shape):
        total = _total(laid, window, shape)
        for result, labels, drop in zip(results, wanted, drops, strict=True):
            target = result[
                tuple(window[label] if label < 2 else slice(None) for label in sorted(labels))
            ]
            np.minimum(target, total.min(axis=drop) if drop else total, out=target)
    return [
        result.transpose([sorted(labels).index(label) for label in labels])
        for result, labels in zip(results, wanted, strict=True)
    ]


def _windows(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Windows of the first two axes, of about `BLOCK` entries each."""
    inner = math.prod(shape[2:])
    width = shape[1] if len(shape) > 1 else 1
    columns = min(width, max(1, BLOCK // inner))
    rows = max(1, BLOCK // (inner * columns))
    lefts = range(0, width, columns)
    return [
        (slice(start, start + rows), slice(left, left + columns))
        for start in range(0, shape[0], rows)
        for left in lefts
    ]


def _total(laid: Sequence[Table], window: tuple[slice, ...], shape: tuple[int, ...]) -> Table:
    """The sum of the tables in the window."""
    block = (
        *(len(range(size)[part]) for size, part in zip(shape, window, strict=False)),
        *shape[2:],
    )
    parts = [
        table[
            tuple(
                slice(None) if size == 1 else part
                for size, part in zip(table.shape, window, strict=False)
            )
        ]
        for table in laid
    ]
    if len(parts) == 1:
        return np.broadcast_to(parts[0], block)
    total = np.empty(block)
    np.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        np.add(total, part, out=total)
    return total
