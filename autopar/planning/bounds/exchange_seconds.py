"""The seconds of exchanges of experts that may run under other computation, link by link.

Where a layer of experts is apart, computation goes on under two of its exchanges in each pass: that
with which rows, or their gradients, set off, and that with which they come home
(`costmodel/step/travelling_rows.py`). It waits for all others: counts of rows, and further
exchanges inside nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.tables.tables import Floats, Ints
from autopar.sharding.communication import Move, operator_traffic
from autopar.sharding.mesh import Axes
from autopar.sharding.rules import Call
from autopar.sharding.strategies import Strategies

EXCHANGE = "all_to_all"


def under_way(
    call: Call, strategies: Strategies, prices: MeshPrices, gradients: frozenset[str]
) -> Mapping[str, Floats]:
    """Return the seconds of a layer's exchanges under which computation goes on.

    They are of both passes of a micro-batch, by link: arrays [strategies].
    """
    travels = strategies.travel_degree(prices.mesh.shape) > 1
    moves = list(_in_order(call, strategies, prices, gradients))
    ahead = [one for one in moves if one.move.phase == "forward"]
    back = [one for one in moves if one.move.phase == "backward"]
    off = [one for one in ahead if one.move.kind == EXCHANGE]
    # Of every exchange that goes out one comes home; gradients of rows do so only if wanted.
    comes_home = _numbers(back, len(travels)) > _numbers(off, len(travels)) // 2
    seconds: dict[str, Floats] = {}
    for some, wanted in (
        (off, travels),
        (ahead[::-1], travels),
        (back, travels),
        (back[::-1], travels & comes_home),
    ):
        # The first of these for each strategy.
        missing = wanted.copy()
        for rows, axes, move in some:
            link = seconds.setdefault(prices.link(axes), np.zeros(len(missing)))
            link[rows] += np.where(missing[rows], prices.move(axes, move), 0.0)
            missing[rows] = False
    return seconds


class _Issued(NamedTuple):
    """A collective of some strategies, over axes of the mesh."""

    rows: Ints
    axes: Axes
    move: Move


def _numbers(issued: Sequence[_Issued], strategies: int) -> Ints:
    """Return the number of collectives in each strategy."""
    numbers = np.zeros(strategies, dtype=np.int64)
    for one in issued:
        numbers[one.rows] += 1
    return numbers


def _in_order(
    call: Call, strategies: Strategies, prices: MeshPrices, gradients: frozenset[str]
) -> Iterator[_Issued]:
    """Yield the collectives of each pass in their order (see `operator_collectives`)."""
    traffic = list(operator_traffic(call, strategies, prices.mesh.shape, gradients))
    for phase in ("forward", "backward"):
        for home in (False, True):
            for rows, axes, moves in reversed(traffic) if home else traffic:
                for move in moves:
                    if (move.phase, move.inside_first) == (phase, home):
                        yield _Issued(rows, axes, move)
