"""Bounds from the shares of stages hold for every cut of small models, and see what stays together.

A step is that of the slowest stage: m passes of it. Brute force tries every cut between operators,
and every choice of each operator.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from autopar.planning.bounds.least_passes import Weights
from autopar.planning.bounds.stage_shares import Group, Stages, shares_bound
from autopar.planning.bounds.units import Piece, Unit
from autopar.planning.tables.tables import Floats
from autopar.search import CostGraph

MICRO_BATCHES = 8.0


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Equal layers of operators in a row; arrays [operators, choices] of each of them."""

    count: int
    seconds: Floats
    stored: Floats
    saved: Floats

    def unit(self, blocks: int) -> Unit:
        """The layers as a unit of a folded model, whose numbers are those of all of them."""
        operators = range(len(self.seconds))
        whole = Piece(
            CostGraph(
                sizes=tuple(len(row) for row in self.seconds),
                unary=tuple(self.count * row for row in self.seconds),
                edges={},
            ),
            tuple(self.count * row for row in self.stored),
            tuple(self.count * row for row in self.saved),
        )
        parts = [part.tolist() for part in np.array_split(np.array(operators), blocks)]
        return Unit(
            count=self.count,
            span=(0, len(self.seconds) - 1),
            whole=whole,
            blocks=tuple(whole.part(part) for part in parts if part),
            loose=whole.part([]),
        )

    def stage(self, operators: range, flying: float, memory: float) -> float:
        """The least seconds of a pass of some operators within the memory."""
        rows = [operator % len(self.seconds) for operator in operators]
        return min(
            (
                math.fsum(
                    self.seconds[row][choice] for row, choice in zip(rows, choices, strict=True)
                )
                for choices in itertools.product(range(self.seconds.shape[1]), repeat=len(rows))
                if math.fsum(
                    self.stored[row][choice] + flying * self.saved[row][choice]
                    for row, choice in zip(rows, choices, strict=True)
                )
                <= memory
            ),
            default=math.inf,
        )

    def best(self, flying: list[float], memory: float) -> float:
        """The least step over every cut into stages."""
        count = self.count * len(self.seconds)
        least = [0.0] + [math.inf] * count
        for stage in flying:
            known = {
                (first, behind): self.stage(range(first, behind), stage, memory)
                for first in range(count + 1)
                for behind in range(first, count + 1)
            }
            least = [
                min(max(least[first], known[first, behind]) for first in range(behind + 1))
                for behind in range(count + 1)
            ]
        return MICRO_BATCHES * least[-1]


def layers(seed: int) -> Layers:
    """Layers whose thrifty choices are slow."""
    rng = np.random.default_rng(seed)
    shape = (2, 2)
    slower = np.array([1.0, 1.5])
    thriftier = np.array([1.0, 0.4])
    return Layers(
        count=3,
        seconds=rng.uniform(0.5, 1.5, shape) * slower,
        stored=rng.uniform(0.5, 1.5, shape) * thriftier,
        saved=rng.uniform(0.2, 1.0, shape) * thriftier,
    )


def stages(flying: list[float], memory: float) -> Stages:
    def means(weights: Weights) -> tuple[float, float]:
        assert sum(weights) == pytest.approx(1.0)
        return MICRO_BATCHES, 0.0

    groups = tuple(Group(stages=1, flying=each) for each in flying)
    return Stages(groups=groups, chunks=1, memory=memory, means=means)


def test_no_cut_of_equal_layers_undercuts_the_bound() -> None:
    flying = [3.0, 2.0, 1.0]
    raised = 0
    for seed, memory in itertools.product(range(12), (30.0, 8.0, 6.0, 5.0, 4.0, 3.0)):
        model = layers(seed)
        bound = shares_bound([model.unit(2)], stages(flying, memory))
        free = MICRO_BATCHES * model.count * model.seconds.min(axis=1).sum() / len(flying)
        assert bound <= model.best(flying, memory) * (1 + 1e-9)
        raised += bound > 1.02 * free
    assert raised > 12


def test_what_one_layer_stores_and_saves_is_on_one_stage() -> None:
    seconds, stored, saved = (np.array([[one]]) for one in (1.0, 4.0, 1.0))
    model = Layers(count=40, seconds=seconds, stored=stored, saved=saved)
    # The first stage has room for 160 / 12 layers, and the second one for the others.
    roomy = shares_bound([model.unit(1)], stages([8.0, 1.0], 160.0))
    assert roomy == pytest.approx(MICRO_BATCHES * (40 - 160 / 12), rel=0.1)
    # Now there is no room for all layers. There would be, were what is stored on the first stage
    # and what is saved on the second one: 40 x 4 + 40 x 1 bytes.
    assert 2 * 120 > 40 * 4 + 40 * 1
    tight = shares_bound([model.unit(1)], stages([8.0, 1.0], 120.0))
    assert tight > 5 * MICRO_BATCHES * 40


def test_a_cut_divides_one_of_two_units() -> None:
    unit = replace(layers(5), count=40).unit(2)
    limit = stages([3.0, 2.0, 1.0], 80.0)
    apart = shares_bound([unit, replace(unit, span=(2, 3))], limit)
    # Where the operators of units run between one another's, a cut may divide them both.
    mixed = shares_bound([unit, replace(unit, span=(1, 2))], limit)
    assert mixed < apart


def test_nothing_is_told_where_a_higher_bound_is_known() -> None:
    unit = layers(1).unit(2)
    limit = stages([3.0, 2.0, 1.0], 6.0)
    assert shares_bound([unit], limit) > 0
    assert shares_bound([unit], limit, known=1e6) == 0
