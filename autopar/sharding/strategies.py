"""`Option`: a choice of an operator on one axis. `Strategies`: choices for all axes of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .layout import Layout, Placement
from .notation import TRAVELS, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of an operator on one axis.

    `factor`: index of the split factor, -1 for none. `parts`: equal parts of the factor, each of
    which is split. `inputs`, `outputs`: the placement of each tensor. `limit`: the largest number
    of shards (0: any number). `communication`: the word of a split that communicates inside the
    operator. Such an option is taken on one axis only and splits its `partners` along with the
    factor. With `beside`, the partners may be split on other axes too, within `inner_parts` equal
    parts.
    """

    name: str
    factor: int
    parts: int
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    partners: tuple[int, ...] = ()
    communication: str | None = None
    limit: int = 0
    beside: bool = False
    inner_parts: int = 1

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        """The factors that it splits as other axes may, each with the number of its parts."""
        own = ((self.factor, self.parts),) if self.factor >= 0 else ()
        # Partners without `beside` belong to the option's own group, which `_in_one_group` checks.
        return (*own, *((partner, self.inner_parts) for partner in self.partners if self.beside))

    def passes(self, rule: Rule, names: Sequence[str]) -> bool:
        """Whether it splits one of the factors `names` with communication inside the operator."""
        return self.communication is not None and rule.factors[self.factor].name in names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategies:
    """All strategies of one operator on a mesh.

    `choices[i, a]` is the option that strategy i takes on axis a.

    Compared as an object, so that it is a cheap key.
    """

    rule: Rule
    options: tuple[Option, ...]
    choices: NDArray[np.int64]

    def names(self, index: int) -> tuple[str, ...]:
        """The option names of strategy `index`, one an axis."""
        return tuple(self.options[o].name for o in self.choices[index])

    def layouts(self, index: int) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """Layouts of the inputs and of the outputs under strategy `index`."""
        options = [self.options[o] for o in self.choices[index]]
        # On a mesh without axes the rule says how many inputs there are.
        count = len(options[0].inputs) if options else len(self.rule.inputs)
        inputs = tuple(tuple(o.inputs[t] for o in options) for t in range(count))
        outputs = tuple(tuple(o.outputs[t] for o in options) for t in range(len(self.rule.outputs)))
        return inputs, outputs

    def degrees(self, mesh: Sequence[int]) -> NDArray[np.int64]:
        """Numbers of shares into which strategy i splits factor f: array [strategies, factors]."""
        return _degrees(self, tuple(mesh))

    def plain_degree(self, mesh: Sequence[int], names: Sequence[str]) -> NDArray[np.int64]:
        """Shares into which each strategy splits the factors `names` without communication: array
        [strategies].
        """
        plain = np.array([splits_plainly(option, self.rule, names) for option in self.options])
        return np.asarray(
            np.where(plain[self.choices], np.array(mesh, dtype=np.int64), 1).prod(axis=1)
        )

    def passing_degree(self, mesh: Sequence[int], names: Sequence[str]) -> NDArray[np.float64]:
        """Shards into which each strategy splits the factors `names` with communication: array
        [strategies].
        """
        passing = np.array([option.passes(self.rule, names) for option in self.options])
        return np.asarray(
            np.where(passing[self.choices], np.array(mesh, dtype=np.float64), 1.0).prod(axis=1)
        )

    def travel_degree(self, mesh: Sequence[int]) -> NDArray[np.int64]:
        """Numbers of ranks from which rows come to each rank in strategy i: array [strategies]."""
        travels = np.array([option.communication in TRAVELS for option in self.options])
        return np.asarray(
            np.where(travels[self.choices], np.array(mesh, dtype=np.int64), 1).prod(axis=1)
        )


# The seconds of an operator, and the bytes of each of its tensors, ask for the same ones.
@functools.lru_cache(maxsize=256)
def _degrees(strategies: Strategies, mesh: tuple[int, ...]) -> NDArray[np.int64]:
    factors = len(strategies.rule.factors)
    degrees = factor_degrees(strategies.options, strategies.choices, mesh, factors)
    degrees.setflags(write=False)
    return degrees


def splits_plainly(option: Option, rule: Rule, names: Sequence[str]) -> bool:
    """Whether an option splits one of the factors `names` without communicating inside."""
    return (
        option.factor >= 0
        and option.communication is None
        and rule.factors[option.factor].name in names
    )


def factor_degrees(
    options: Sequence[Option], choices: NDArray[np.int64], mesh: Sequence[int], factors: int
) -> NDArray[np.int64]:
    """Parts into which each strategy splits each factor: array [strategies, factors]."""
    splits = np.zeros((len(options), factors), dtype=bool)
    for index, option in enumerate(options):
        # An option without a factor has -1 here, which would mean the last one.
        splits[index, [f for f in (option.factor, *option.partners) if f >= 0]] = True
    degrees = np.ones((len(choices), factors), dtype=np.int64)
    for axis, size in enumerate(mesh):
        degrees *= np.where(splits, size, 1)[choices[:, axis]]
    return degrees
