"""All-reduces of an operand's largest element, where one scale is that of a whole split tensor.

A product whose recipe has such scales (`Recipe.whole`) needs the maximum over the ranks that hold
shards: of its values and of its weights before the forward product, and of the gradient of its
result before the two backward ones. Weights that come as narrow copies bring their scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES, Operator
from autopar.ir.recipes import recipe_of
from autopar.ir.stored_products import STORED

from ..layout import Kind, Layout
from ..mesh import Axes, axis_sets
from ..rules import Call
from ..strategies import Strategies
from .moves import Move

OPERANDS = ("forward", "forward", "backward")
"""The pass in which values, weights and the gradient of the result are brought to a scale."""
NBYTES = DTYPE_BYTES["float32"]


def has_largest(operator: Operator) -> bool:
    """Whether an operator needs largest elements of whole tensors."""
    recipe = recipe_of(operator)
    return recipe is not None and recipe.whole and operator.kind in STORED


def axes_of_operands(
    call: Call, inputs: Sequence[Layout], output: Layout, mesh: Sequence[int]
) -> tuple[Axes, ...]:
    """The axes that split the values, the weights and the result; none without such scales."""
    if not has_largest(call.operator):
        return ()
    scaled = (True, not _is_held(call), True)
    return tuple(
        tuple(
            axis
            for axis, (place, size) in enumerate(zip(layout, mesh, strict=True))
            if size > 1 and place.kind is Kind.SPLIT and asked
        )
        for layout, asked in zip((*inputs[:2], output), scaled, strict=True)
    )


def _is_held(call: Call) -> bool:
    """Whether the weights come as a narrow copy."""
    return call.inputs[1].narrow is not None


def largest_traffic(
    call: Call, strategies: Strategies, mesh: Sequence[int], gradients: frozenset[str]
) -> Iterator[tuple[NDArray[np.int64], Axes, Sequence[Move]]]:
    """The all-reduces of every strategy: indices of strategies, axes of the group, moves."""
    if not has_largest(call.operator):
        return
    sizes = np.array(mesh) > 1
    placements = [(*option.inputs[:2], option.outputs[0]) for option in strategies.options]
    trained = call.outputs[0].name in gradients
    for operand, phase in enumerate(OPERANDS):
        if (phase == "backward" and not trained) or (operand == 1 and _is_held(call)):
            continue
        split = np.array([places[operand].kind is Kind.SPLIT for places in placements])
        taken = split[strategies.choices] & sizes
        for axes in axis_sets(mesh):
            exactly = taken[:, axes].all(axis=1) & (taken.sum(axis=1) == len(axes))
            rows = np.nonzero(exactly)[0]
            if len(rows):
                nbytes = np.full(len(rows), float(NBYTES))
                yield rows, axes, (Move(phase=phase, kind="all_reduce", nbytes=nbytes),)
