"""Bounds of pipelines from the share of a model that each stage can do within its memory.

Let stage s have f_s micro-batches in flight, x_s seconds for a pass of one of them, and M bytes.
With weights w of the sum 1 and prices q >= 0 of a byte, K of `least_passes` for these weights, and
R the messages that count, a step takes, for every cut of the model,

    T  >=  sum over s of  w_s K x_s + q_s (stored_s + f_s saved_s - M)  +  R

A layer that is whole on a stage pays that stage's weight for its seconds, and that stage's price
for what it stores and for what it saves. So N equal layers take N times what one of them takes on
the stage where it is cheapest. A layer that cuts divide among groups of stages takes less, with
each part where it is cheapest. Behind group g a cut saves s_g at the most: so much that no layer
saves more than the s_g of its cuts. There are as many of these cuts as each stage has chunks.

The weights and prices come from the whole model. With Y_s(r) the least seconds plus r times the
bytes of all layers, were they on stage s, that stage can do in T seconds no more than the share

    min over r of  (T + r M) / Y_s(r)

and the shares of all stages add up to 1. The r of the least T at which they do give the prices: w_s
is in proportion to 1 / Y_s(r_s), and q_s = w_s r_s. This is a Lagrangian dual (H. Everett III,
Generalized Lagrange Multiplier Method, 1963), whose ways to run the model are found as in G.
Dantzig and P. Wolfe, Decomposition Principle for Linear Programs, 1960.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .least_passes import Weights
from .units import Prices, Unit, Way

ROUNDS = 6
"""How often ways to run the model are looked for."""
NEAR = 1e-3
"""The relative distance at which no further way to run it is looked for."""
DEAR = 100.0
"""At the dearest price of a byte the model's bytes cost so many times its seconds."""
HALVINGS = 40
"""Steps of bisection for the seconds in which the shares of all stages add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring stages of equal prices; `flying`: the fewest micro-batches in flight on one."""

    stages: int
    flying: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a pipeline, in groups.

    `chunks`: of each stage, at most. `memory`: bytes of a device. `means`: gives K and the messages
    of a bound with some weights of the stages.
    """

    groups: tuple[Group, ...]
    chunks: int
    memory: float
    means: Callable[[Weights], tuple[float, float]]


def shares_bound(units: Sequence[Unit], stages: Stages, known: float = 0.0) -> float:
    """Return seconds that no step undercuts; raises `NoAssignment` if nothing is allowed.

    `known`: a bound of them; where no higher one is to be had, nothing is (0).
    """
    groups = stages.groups
    count = sum(group.stages for group in groups)
    passes, _ = stages.means((1 / count,) * count)
    if passes <= 0:
        return 0.0
    prices = _Shares(units, stages, passes).prices()
    # All stages of a group weigh the same.
    weights = tuple(
        each.second for each, group in zip(prices, groups, strict=True) for _ in range(group.stages)
    )
    # Paths with other weights have other passes and messages.
    passes, messages = stages.means(weights)
    if passes <= 0:
        return 0.0
    charged = [replace(each, second=passes * each.second) for each in prices]
    free = messages - stages.memory * math.fsum(
        group.stages * each.stored for each, group in zip(prices, groups, strict=True)
    )
    divided = [_Divided(unit, charged, around=stages.chunks > 1) for unit in units]
    whole = math.fsum(each.whole for each in divided)
    # Whatever cuts save, the bound is no higher than this; to know what they save takes longest.
    if whole + free <= known:
        return 0.0
    # Every chunk is cut once between neighbouring groups, and goes on with the first one.
    often = [stages.chunks] * (len(groups) - 1) + [stages.chunks - 1]
    saved = math.fsum(count * most for count, most in zip(often, _most_saved(divided), strict=True))
    everywhere = math.fsum(each.everywhere for each in divided)
    return max(whole - saved, everywhere) + free


def _most_saved(divided: Sequence[_Divided]) -> list[float]:
    """Return how much a cut behind each group saves at the most.

    It divides one unit, or all of those whose operators run between one another's.
    """
    clusters: list[list[float]] = []
    behind = -1
    for each in sorted(divided, key=lambda each: each.unit.span):
        first, last = each.unit.span
        # One cut may be in several of these, and their savings add up.
        if clusters and first <= behind:
            clusters[-1] = [a + b for a, b in zip(clusters[-1], each.saved, strict=True)]
        else:
            clusters.append(each.saved)
        behind = max(behind, last)
    return [max(column) for column in zip(*clusters, strict=True)]


class _Divided:
    """A unit on groups of stages with prices of their own, which cuts may divide.

    `around`: whether a unit may begin on the last group and end on the first one.
    """

    def __init__(self, unit: Unit, prices: Sequence[Prices], *, around: bool) -> None:
        self.unit = unit
        self.prices = prices
        self.around = around
        self.whole = min(map(unit.whole.cost, prices))
        self.everywhere = float(unit.whole.alone(prices).min(axis=1).sum())
        self._blocks = [
            ([block.cost(each) for each in prices], block.alone(prices)) for block in unit.blocks
        ]
        self._loose = unit.loose.alone(prices)

    @cached_property
    def saved(self) -> list[float]:
        """How much a cut behind each group saves in one unit, alone or with others there."""
        groups = len(self.prices)
        saved = [0.0] * groups
        # Few cuts come first, so that many ones in a unit only add what they save together.
        for more in range(1, groups):
            for first in range(groups if self.around else groups - more):
                on = [(first + number) % groups for number in range(more + 1)]
                self._raise(saved, on[:-1], self._over(on))
        # What is on more groups than there are has all of these cuts, and some of them twice.
        if self.around:
            self._raise(saved, range(groups), self.everywhere)
        return saved

    def _raise(self, saved: list[float], cuts: Sequence[int], price: float) -> None:
        """Let some cuts of a unit save all that makes it as cheap as `price`."""
        lacking = (self.whole - price) / self.unit.count - math.fsum(saved[cut] for cut in cuts)
        for cut in cuts:
            saved[cut] += max(lacking, 0.0) / len(cuts)

    def _over(self, on: Sequence[int]) -> float:
        """Return the least price of a unit that begins on the first group and ends on the last."""
        # The least price of the blocks so far, by the group on which the last of them ends.
        least = [0.0] + [math.inf] * (len(on) - 1)
        for whole, alone in self._blocks:
            # A block on several groups has each of its variables where it is cheapest.
            divided = [
                np.minimum.accumulate(alone[:, on[start:]], axis=1).sum(axis=0)
                for start in range(len(on))
            ]
            least = [
                min(
                    before + (whole[on[end]] if start == end else divided[start][end - start])
                    for start, before in enumerate(least[: end + 1])
                )
                for end in range(len(on))
            ]
        return least[-1] + float(self._loose[:, on].min(axis=1).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The share of the model that a stage can do, and the price of a byte that tells it.

    `least`: Y of that stage at this price, from the ways that are known.
    """

    share: float
    price: float
    least: float


class _Shares:
    """The shares of stages, from the ways to run the whole model that are known."""

    def __init__(self, units: Sequence[Unit], stages: Stages, passes: float) -> None:
        self.units = units
        self.stages = stages
        self.passes = passes
        self.ways: list[Way] = []

    def prices(self) -> list[Prices]:
        """Return weights and prices of each group at which the shares of all stages add up to 1."""
        groups = self.stages.groups
        # The fastest way, and a thrifty one.
        self._look(0.0, groups[0])
        fastest = self.ways[0]
        used = fastest.stored + groups[0].flying * fastest.saved
        self._look(DEAR * self.passes * fastest.seconds / max(used, 1.0), groups[0])
        # Every round asks each stage for a better way to run the model at its own price.
        for _ in range(ROUNDS):
            seconds = self._seconds()
            told = [self._share(seconds, group) for group in groups]
            least = [
                self._look(each.price, group) for each, group in zip(told, groups, strict=True)
            ]
            near = zip(least, told, strict=True)
            if all(true >= (1 - NEAR) * each.least for true, each in near):
                break
        # The weights that make the model cost the same on every stage.
        inverse = [1 / true for true in least]
        total = sum(group.stages * part for group, part in zip(groups, inverse, strict=True))
        return [
            Prices(
                second=part / total,
                stored=part / total * each.price,
                saved=part / total * each.price * group.flying,
            )
            for part, each, group in zip(inverse, told, groups, strict=True)
        ]

    def _look(self, price: float, group: Group) -> float:
        """Return Y of a stage at a price of a byte, and note the way to run the model at it."""
        prices = Prices(second=self.passes, stored=price, saved=price * group.flying)
        parts = [unit.whole.way(prices) for unit in self.units]
        ways = [way for _, way in parts]
        self.ways.append(
            Way(
                seconds=math.fsum(way.seconds for way in ways),
                stored=math.fsum(way.stored for way in ways),
                saved=math.fsum(way.saved for way in ways),
            )
        )
        return math.fsum(least for least, _ in parts)

    def _seconds(self) -> float:
        """Return the least seconds in which the shares of all stages add up to 1."""
        # On one stage all ways fit in the seconds of the slowest one, but for their memory.
        low = 0.0
        high = self.passes * max(way.seconds for way in self.ways)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            shares = (
                group.stages * self._share(middle, group).share for group in self.stages.groups
            )
            if sum(shares) >= 1:
                high = middle
            else:
                low = middle
        return high

    def _share(self, seconds: float, group: Group) -> _Share:
        """Return the share of the model that a stage can do in so many seconds."""
        spent = self.passes * np.array([way.seconds for way in self.ways])
        used = np.array([way.stored + group.flying * way.saved for way in self.ways])
        # Between the prices at which two ways cost the same, the share rises or falls throughout.
        with np.errstate(divide="ignore", invalid="ignore"):
            crossings = (spent[:, None] - spent) / (used - used[:, None])
        # Where too little memory is there for the whole model, no price is dear enough.
        dearest = DEAR * spent.max() / max(used.max(), 1.0)
        prices = np.concatenate(([0.0, dearest], crossings[crossings > 0]))
        prices = np.unique(prices[np.isfinite(prices)])
        least = (spent + prices[:, None] * used).min(axis=1)
        shares = (seconds + prices * self.stages.memory) / least
        best = int(shares.argmin())
        return _Share(
            share=float(shares[best]), price=float(prices[best]), least=float(least[best])
        )
