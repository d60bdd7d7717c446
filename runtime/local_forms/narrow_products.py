"""Linear products of operands in 8 bits or fewer, by a recipe, with their backward passes.

    y  = n(x along k) n(w along k)^T
    dx = n(g along n) n(w along n)
    dw = n(g along rows)^T n(x along rows)

n rounds a tensor with a scale for each block along the side that the product sums over, or for the
whole tensor. The largest element of a whole tensor is the maximum over the ranks that hold shards
of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autopar.ir import Value
from autopar.ir.recipes import RECIPES, Recipe
from autopar.ir.stored_products import AFFINE, LINEAR
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.collectives import all_reduce
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.sharding.communication import axes_of_operands
from autopar.sharding.rules import Call

from .narrow_types import Blocks, Narrow, largest, narrowed, working_type
from .narrow_weights import NarrowWeight

Groups = Sequence[AxisGroup | None]
"""The ranks that hold shards of the values, of the weights and of the result."""


def _whole(value: Tensor, recipe: Recipe, group: AxisGroup | None) -> Tensor | None:
    """The largest element of a tensor on all ranks that hold shards of it, where it counts."""
    if not recipe.whole:
        return None
    own = largest(value)
    return own if group is None else all_reduce(own, group, "max")


def along_columns(recipe: Recipe) -> Blocks:
    """Blocks of a row's elements."""
    return (1, recipe.block) if recipe.block else (0, 0)


def along_rows(recipe: Recipe) -> Blocks:
    """Blocks of a column's elements."""
    return (recipe.block, 1) if recipe.block else (0, 0)


def of_weights(recipe: Recipe, blocks: Blocks) -> Blocks:
    """Blocks of weights, which are squares in some recipes."""
    return (recipe.block, recipe.block) if recipe.square else blocks


class _Linear(torch.autograd.Function):
    """The product with a bias; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        groups: Groups,
        keeps_narrow: bool,
        affine: bool,
    ) -> Tensor:
        kind = recipe.values
        of_values = _whole(x, recipe, groups[0])
        held = isinstance(weight, NarrowWeight)
        ctx.of_weights = None if held else _whole(weight, recipe, groups[1])
        values = narrowed(x, recipe, kind, along_columns(recipe), of_values)
        read = _read(weight, recipe, along_columns(recipe), ctx.of_weights, affine)
        y = linear(values.wide(), read, None if bias is None else bias.to(_work(x)))
        # Scales of whole tensors are communicated once, and serve the backward pass, too.
        ctx.recipe = recipe
        ctx.affine = affine
        ctx.groups = groups
        ctx.of_values = of_values
        ctx.biased = bias is not None
        ctx.seen = None
        ctx.copied = None
        # With one scale for the whole tensor its rows and columns are rounded alike.
        if keeps_narrow and ctx.needs_input_grad[1]:
            rows = narrowed(x, recipe, kind, along_rows(recipe), of_values)
            ctx.copied = rows if recipe.block else values
        ctx.save_for_backward(None if ctx.copied is not None else x, weight)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = gradients[0]
        recipe: Recipe = ctx.recipe
        x, weight = ctx.saved_tensors
        # Weights' gradients may be asked for later, by the same gradient of the result.
        if ctx.seen is None or ctx.seen[0].data_ptr() != gradient.data_ptr():
            ctx.seen = (gradient, _whole(gradient, recipe, ctx.groups[2]))
        whole = ctx.seen[1]
        kind = recipe.gradients
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            rows = narrowed(gradient, recipe, kind, along_columns(recipe), whole)
            read = _read(weight, recipe, along_rows(recipe), ctx.of_weights, ctx.affine)
            of_x = (rows.wide() @ read).to(weight.dtype)
        if ctx.needs_input_grad[1]:
            columns = narrowed(gradient, recipe, kind, along_rows(recipe), whole)
            copied: Narrow = ctx.copied or narrowed(
                x, recipe, recipe.values, along_rows(recipe), ctx.of_values
            )
            # The gradient is made in the order of the matrix, without a copy that turns it.
            sides = (columns.wide(), copied.wide())
            left, right = reversed(sides) if ctx.affine else sides
            of_weight = (_flat(left).T @ _flat(right)).to(weight.dtype)
        if ctx.biased and ctx.needs_input_grad[2]:
            of_bias = _flat(gradient.to(_work(gradient))).sum(0).to(weight.dtype)
        return of_x, of_weight, of_bias, None, None, None, None


def _read(
    weight: Tensor, recipe: Recipe, blocks: Blocks, whole: Tensor | None, affine: bool
) -> Tensor:
    """The weights [out, in] as a product reads them: as they come if narrow, else rounded now."""
    if isinstance(weight, NarrowWeight):
        made = weight.wide(_work(weight))
    else:
        # Blocks are named by the sides of [out, in].
        blocks = of_weights(recipe, blocks[::-1] if affine else blocks)
        made = narrowed(weight, recipe, recipe.values, blocks, whole).wide()
    return made.T if affine else made


def _work(value: Tensor) -> torch.dtype:
    return working_type(value)


def _flat(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def narrow_linear(
    input: Tensor,
    weight: Tensor,
    recipe: str,
    groups: Groups,
    bias: Tensor | None = None,
    keeps_narrow: bool = False,
    affine: bool = False,
) -> Tensor:
    """The product of this rank's shards by a recipe; `affine`: its matrix is stored [in, out]."""
    out: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, RECIPES[recipe], groups, keeps_narrow, affine
    )
    return out


def affine(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of values with a matrix stored [in, out]."""
    return linear(input, weight.T, bias)


def shard_linear(call: LocalCall) -> Mapping[str, Any] | None:
    """The groups of ranks that share a scale; None for a product without a recipe."""
    recipe: Value = call.operator.attributes.get("recipe")
    if recipe is None:
        return None
    decision = call.decision
    whole = Call(operator=call.operator, inputs=call.inputs, outputs=call.outputs)
    taken = axes_of_operands(whole, decision.inputs, decision.outputs[0], call.mesh)
    # Micro-batches follow one another on an axis without ranks, and have scales of their own.
    present = (tuple(a for a in axes if call.groups[a].name) for axes in taken or ((), (), ()))
    return {"groups": tuple(call.over(axes) if axes else None for axes in present)}


register(LINEAR, knows=shard_linear, local=narrow_linear)
register(
    AFFINE, function=affine, knows=shard_linear, local=functools.partial(narrow_linear, affine=True)
)
