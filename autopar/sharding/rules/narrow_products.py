"""Rules of products whose operands have a scale for each block of elements (`autopar.ir.recipes`).

A dim of d elements with blocks of q is spelled (n !q), n = d / q: a split leaves every block whole.
Where q does not divide d, the dim stays whole. Rows have blocks, too, as the product for the
gradient of the weights sums over them.
"""

from __future__ import annotations

import re

from autopar.ir.recipes import recipe_of
from autopar.ir.stored_products import AFFINE

from .registry import Call


def blocked(call: Call) -> str | None:
    """The rule of a linear product by blocks; None where its recipe, if it has one, has none."""
    recipe = recipe_of(call.operator)
    if recipe is None or not recipe.block:
        return None
    values = call.inputs[0].shape
    affine = call.operator.kind == AFFINE
    weight = call.inputs[1].shape[::-1] if affine else call.inputs[1].shape

    def dim(name: str, size: int) -> str:
        blocks, rest = divmod(size, recipe.block)
        return f"!{name}" if rest else f"({name}={blocks} !{name}q)"

    # Rows are counted within the last dim that holds any, so that no block depends on the batch.
    rows = [f"d{i}" for i in range(len(values) - 1)]
    rows[-1] = dim(rows[-1], values[-2])
    leading = " ".join(rows)
    inner = dim("k", weight[1])
    outer = dim("n", weight[0])
    matrix = f"{inner} {outer}" if affine else f"{outer} {inner}"
    return f"{leading} {inner}, {matrix}, +{outer} -> {leading} {outer} | k: sum"


def blocked_experts(call: Call, text: str, inner: int) -> str:
    """The rule of a layer of experts, `inner` its dim f (0: not known), split by blocks or whole.

    A scale of a row reaches over all of f.
    """
    recipe = recipe_of(call.operator)
    if recipe is None:
        return text
    sides, _, clauses = text.partition("|")
    blocks, rest = divmod(inner, recipe.block) if inner and recipe.block else (0, 1)
    if recipe.whole or rest:
        staying = "; ".join(c.strip() for c in clauses.split(";") if not c.strip().startswith("f:"))
        return f"{_INNER.sub('!f', sides)}| {staying}"
    spelled = f"f={blocks} !fq"
    # In a compound it stands last.
    within = re.sub(r"\bf\)", "F)", sides)
    return _INNER.sub(f"({spelled})", within).replace("F)", f"{spelled})") + "|" + clauses


_INNER = re.compile(r"\bf\b")


def rounds(call: Call) -> bool:
    """Whether an operator rounds, so that neither partial values nor shares of gradients pass."""
    return recipe_of(call.operator) is not None
