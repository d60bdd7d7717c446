"""What operators communicate inside themselves, when a factor is split that needs it: the words after `:` in a rule, as a table.

An option with such a word is taken on one mesh axis only, and no other axis splits its factors. Each word says what every rank
issues, in order, as a function of the local sizes; `runtime/communicating` holds the local form under the same word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..ir import DTYPE_BYTES
from .notation import Rule, local_elements
from .rules import Call

if TYPE_CHECKING:
    from .candidates import Strategies

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective on the axis: `phase` is forward or backward; `nbytes` [strategies] by the collective's convention."""

    phase: str
    kind: str
    nbytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An operator whose factor `factor` is split on an axis of `size` ranks; `local`: local factor sizes [strategies, factors]."""

    call: Call
    rule: Rule
    factor: int
    size: int
    local: Floats
    train: bool

    def input_bytes(self, index: int) -> Floats:
        """Bytes of the shard of an input."""
        return local_elements(self.rule.inputs[index], self.local) * DTYPE_BYTES[self.call.inputs[index].dtype]

    def output_elements(self, index: int = 0) -> Floats:
        """Elements of the shard of an output."""
        return local_elements(self.rule.outputs[index], self.local)

    def elements(self, *factors: int) -> Floats:
        """The product of the local sizes of factors."""
        return np.asarray(np.prod(self.local[:, list(factors)], axis=1))


def _unlimited(call: Call, rule: Rule, factor: int) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """`moves`: what every rank issues, in order; `limit`: the most shards (0: any number, 1: it cannot be split)."""

    moves: Callable[[Split], Sequence[Move]]
    limit: Callable[[Call, Rule, int], int] = _unlimited


def _statistics_itemsize(split: Split) -> int:
    """Half precision is summed in single."""
    return max(DTYPE_BYTES[split.call.inputs[0].dtype], 4)


def _vocabulary(split: Split) -> list[Move]:
    """The rows' maxima, then their sums of exponentials with the score of the target (its weight, and the mean of the scores)."""
    classes = {f for f in range(len(split.rule.factors)) if f == split.factor}
    rows = sorted({f for dim in split.rule.inputs[0] for f in dim} - classes)
    nbytes = split.elements(*rows) * _statistics_itemsize(split)
    return [
        Move(phase="forward", kind="all_reduce", nbytes=nbytes),
        Move(phase="forward", kind="all_reduce", nbytes=nbytes * class_loss_sums(split.call.operator.attributes, split.call)),
    ]


def class_loss_sums(attributes: Mapping[str, Any], call: Call) -> int:
    """How many sums over the classes a split cross entropy needs for each row."""
    weighted = call.position("weight") is not None
    smoothed = bool(attributes.get("label_smoothing"))
    return 2 + weighted + smoothed * (1 + weighted)


COMMUNICATIONS: Mapping[str, Communication] = {
    "vocabulary": Communication(moves=_vocabulary),
}


def operator_traffic(
    call: Call, strategies: Strategies, mesh: Sequence[int], *, train: bool
) -> Iterator[tuple[NDArray[np.int64], int, Sequence[Move]]]:
    """For each option that communicates and each axis: (the strategies that take it there, the axis, what they issue)."""
    sizes = np.array([factor.size for factor in strategies.rule.factors], dtype=np.float64)
    local = sizes / strategies.degrees(mesh)
    for index, option in enumerate(strategies.options):
        if option.special is None:
            continue
        for axis, size in enumerate(mesh):
            rows = np.nonzero(strategies.choices[:, axis] == index)[0]
            if size > 1 and len(rows):
                split = Split(call=call, rule=strategies.rule, factor=option.factor, size=size, local=local[rows], train=train)
                yield rows, axis, COMMUNICATIONS[option.special].moves(split)
