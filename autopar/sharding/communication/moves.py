"""Collectives inside an operator, with their bytes as functions of its local sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES

from ..notation import Rule, local_elements
from ..rules import Call

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective of the group.

    `phase`: forward or backward. `nbytes` [strategies]: by the collective's convention. `most`:
    of an exchange whose `nbytes` are the mean over what data may ask for, the largest number.
    `home`: whether the innermost axis comes first, as in an ordinary backward pass. `outermost`
    [strategies]: the first of the axes along which the rows of an exchange go in turn.
    """

    phase: str
    kind: str
    nbytes: Floats
    most: Floats | None = None
    home: bool | None = None
    outermost: NDArray[np.int64] | None = None

    @property
    def inside_first(self) -> bool:
        """Whether of the exchanges along several axes the innermost one is the first."""
        return self.phase == "backward" if self.home is None else self.home


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An operator with `factor` split in a group of `size` ranks.

    `local`: local factor sizes [strategies, factors]. `outside` [strategies]: the ranks on further
    axes of the same option, outside of this one; `outermost`: the first of all its axes.
    """

    call: Call
    rule: Rule
    factor: int
    size: int
    local: Floats
    outside: Floats
    outermost: NDArray[np.int64]
    gradients: frozenset[str]

    @property
    def train(self) -> bool:
        """Whether an output of the operator receives a gradient."""
        return any(t.name in self.gradients for t in self.call.outputs)

    def has_gradient(self, index: int) -> bool:
        """Whether a gradient of an input is wanted."""
        return self.train and self.call.inputs[index].name in self.gradients

    def input_bytes(self, index: int) -> Floats:
        """Bytes of the shard of an input."""
        return (
            local_elements(self.rule.inputs[index], self.local)
            * DTYPE_BYTES[self.call.inputs[index].dtype]
        )

    def output_elements(self, index: int = 0) -> Floats:
        """Elements of the shard of an output."""
        return local_elements(self.rule.outputs[index], self.local)

    def elements(self, *factors: int) -> Floats:
        """The product of the local sizes of factors."""
        return np.asarray(np.prod(self.local[:, list(factors)], axis=1))
