"""Grouped products of experts with operands in 8 bits or fewer, by a recipe.

    y_r  = n(x_r) n(w_e)        row r of expert e
    dx_r = n(g_r) n(w_e)^T
    dw_e = sum over its rows of x_r^T g_r

A row has a scale of its own, or one for each block of its elements; so it is rounded alike on any
rank. Gradients of weights sum over rows, and are made of operands as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.ir.recipes import RECIPES, Recipe
from autopar.runtime.operators.registry import register
from autopar.sharding.rules.experts import PRODUCTS

from .narrow_products import along_columns, along_rows, of_weights
from .narrow_types import Blocks, Narrow, narrowed, working_type
from .narrow_weights import NarrowWeight

ROW: Blocks = (1, 0)
MATRIX: Blocks = (0, 0)


def _rows(value: Tensor, recipe: Recipe, kind: str) -> Tensor:
    """Rows as they are read after rounding."""
    blocks = along_columns(recipe) if recipe.block else ROW
    whole = value.detach().abs().amax(-1, keepdim=True) if recipe.over else None
    return narrowed(value, recipe, kind, blocks, whole).wide()


def _matrices(weight: Tensor, recipe: Recipe, blocks: Blocks, *, turned: bool) -> Tensor:
    """The matrices [experts, k, n] as they are read after rounding; `turned`: [experts, n, k]."""
    if isinstance(weight, NarrowWeight):
        wide = weight.wide(working_type(weight))
        return wide.transpose(1, 2) if turned else wide
    blocks = of_weights(recipe, blocks) if recipe.block else MATRIX
    whole = weight.detach().abs().amax((-2, -1), keepdim=True) if recipe.over else None
    made: Narrow = narrowed(weight, recipe, recipe.values, blocks, whole)
    return made.wide()


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The products of rows that are sorted by expert; rows behind the last end give zeros."""
    out = rows.new_zeros(rows.shape[0], matrices.shape[-1])
    start = 0
    # This waits for the device: on CPUs the ends are at hand.
    for expert, end in enumerate(ends.tolist()):
        out[start:end] = rows[start:end] @ matrices[expert]
        start = end
    return out


class _Grouped(torch.autograd.Function):
    """The products of rows with the matrices of their experts; see the module."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, recipe: Recipe, turned: bool
    ) -> Tensor:
        ctx.recipe = recipe
        ctx.turned = turned
        ctx.save_for_backward(rows, weight, ends)
        values = _rows(rows, recipe, recipe.values)
        matrices = _matrices(weight, recipe, along_rows(recipe), turned=turned)
        return _grouped(values, matrices, ends).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = gradients[0]
        recipe: Recipe = ctx.recipe
        rows, weight, ends = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            values = _rows(gradient, recipe, recipe.gradients)
            matrices = _matrices(weight, recipe, along_columns(recipe), turned=ctx.turned)
            of_rows = _grouped(values, matrices.transpose(1, 2), ends).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            work = working_type(gradient)
            sums = rows.new_zeros(weight.shape, dtype=work)
            matrices = sums.transpose(1, 2) if ctx.turned else sums
            start = 0
            for expert, end in enumerate(ends.tolist()):
                matrices[expert] = rows[start:end].to(work).T @ gradient[start:end].to(work)
                start = end
            of_weight = sums.to(weight.dtype)
        return of_rows, of_weight, None, None, None


def narrow_grouped(recipe: str, names: tuple[str, str], *, turned: bool) -> Callable[..., Tensor]:
    """A grouped product by a recipe, its rows and weights under these argument names.

    `turned`: it reads the weights transposed.
    """

    def call(**arguments: Any) -> Tensor:
        rows, weight = (arguments[name] for name in names)
        out: Tensor = _Grouped.apply(  # type: ignore[no-untyped-call]
            rows, weight, arguments["offs"], RECIPES[recipe], turned
        )
        return out

    return call


def _named(kind: str, recipe: str, *, turned: bool) -> str:
    return f"{kind}@{recipe}" + "@turned" * turned


def by_recipe(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """The attributes of a layer of experts, its products by its recipe, if it has one."""
    recipe = attributes.get("recipe")
    if not isinstance(recipe, str):
        return dict(attributes)
    network: Any = attributes["network"]
    turned: Any = attributes.get("turned", ())
    operands = {f"%w{number}" for number in turned}

    def local(kind: str, arguments: Any) -> str:
        # Activations between products keep their type.
        if kind not in PRODUCTS:
            return kind
        weight = dict(arguments)[PRODUCTS[kind][1]]
        return _named(kind, recipe, turned=weight in operands)

    narrow = tuple((local(kind, given), given, results) for kind, given, results in network)
    rest = {n: value for n, value in attributes.items() if n not in ("recipe", "turned")}
    return {**rest, "network": narrow}


for _kind, _names in PRODUCTS.items():
    for _recipe in RECIPES:
        for _turned in (False, True):
            register(
                _named(_kind, _recipe, turned=_turned),
                function=narrow_grouped(_recipe, _names, turned=_turned),
            )
