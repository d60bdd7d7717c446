"""Cross entropy and the product that makes its scores, which nothing else reads.

cross_entropy(x Wᵀ, y)        or of capped scores, cap tanh(x Wᵀ / cap)
"""

from __future__ import annotations

import math

from autopar.ir import Operator, Ref
from autopar.ir.stored_products import LINEAR_LOSS

from .spelling import SHAPED, Spelling, beside, word

_SUM = 2
_IDLE = (*SHAPED, "to", "_to_copy", "alias")


def linear_cross_entropy(operator: Operator, spelling: Spelling) -> Operator | None:
    """The summed loss of rows by a matrix of classes without a bias."""
    given = operator.attributes
    plain = not given.get("label_smoothing") and given.get("weight") is None
    if word(operator) != "cross_entropy_loss" or given.get("reduction") != _SUM or not plain:
        return None
    scores, target = operator.inputs
    if len(spelling.shape(scores)) != 2 or spelling.tensors[target].is_float:
        return None
    name, scale, cap = spelling.capped(spelling.unshaped(scores))
    product = spelling.maker(spelling.unshaped(name), "linear")
    if product is None or len(product.inputs) != 2 or not math.isclose(scale, 1.0):
        return None
    if not spelling.leads_to(product.outputs[0], operator.outputs[0]):
        return None
    rows = spelling.shape(product.inputs[0])[:-1]
    fits = math.prod(rows) == spelling.shape(scores)[0]
    # The operator computes in single precision by itself, unless it is given more.
    widest = "float64" if spelling.width(product.outputs[0]) > 4 else "float32"
    fits = fits and spelling.dtype(operator.outputs[0]) == widest
    # Gradients that are made before the loss is scaled would leave the range of float16.
    fits = fits and spelling.dtype(product.outputs[0]) != "float16"
    if not fits or product.attributes.get("recipe") is not None:
        return None
    return Operator(
        name=beside(product, "linear_cross_entropy"),
        kind=LINEAR_LOSS,
        inputs=(*product.inputs, _apart(target, rows, spelling)),
        outputs=operator.outputs,
        attributes={
            "input": Ref(0),
            "linear_weight": Ref(1),
            "target": Ref(2),
            "ignore_index": given.get("ignore_index", -100),
            **({"cap": cap} if cap else {}),
        },
    )


def _apart(target: str, rows: tuple[int, ...], spelling: Spelling) -> str:
    """The target with a dim for each of the rows', if it was flattened; else as it is."""
    name = target
    while (maker := spelling.maker(name, *_IDLE)) is not None:
        if spelling.shape(name) == rows:
            break
        name = maker.inputs[0]
    same = spelling.shape(name) == rows and spelling.dtype(name) == spelling.dtype(target)
    return name if same else target
