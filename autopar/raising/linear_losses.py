"""Cross entropy and the product that makes its scores, which nothing else reads.

cross_entropy(x Wᵀ, y)        or of capped scores, cap tanh(x Wᵀ / cap)
"""

from __future__ import annotations

import math

from autopar.ir import Operator, Ref

from .spelling import Spelling, beside, word

KIND = "autopar.linear_cross_entropy.default"
_SUM = 2
_SHAPED = ("view", "reshape", "flatten", "_unsafe_view", "contiguous", "clone")
_IDLE = (*_SHAPED, "to", "_to_copy", "alias")


def linear_cross_entropy(operator: Operator, spelling: Spelling) -> Operator | None:
    """The summed loss of rows by a matrix of classes without a bias."""
    given = operator.attributes
    plain = not given.get("label_smoothing") and given.get("weight") is None
    if word(operator) != "cross_entropy_loss" or given.get("reduction") != _SUM or not plain:
        return None
    scores, target = operator.inputs
    if len(spelling.shape(scores)) != 2 or spelling.tensors[target].is_float:
        return None
    product, cap = _capped(scores, spelling)
    if product is None or word(product) != "linear" or len(product.inputs) != 2:
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
        kind=KIND,
        inputs=(*product.inputs, _apart(target, rows, spelling)),
        outputs=operator.outputs,
        attributes={
            "input": Ref(0),
            "weight": Ref(1),
            "target": Ref(2),
            "ignore_index": given.get("ignore_index", -100),
            **({"cap": cap} if cap else {}),
        },
    )


def _capped(scores: str, spelling: Spelling) -> tuple[Operator | None, float]:
    """The maker of scores before a cap, and the cap (0: none); None if others read them."""
    outer = _alone(scores, spelling)
    cap = spelling.number(outer, "other", 1) if outer is not None and word(outer) == "mul" else None
    if outer is None or not cap:
        return outer, 0.0
    tanh = _alone(outer.inputs[0], spelling)
    scale = _alone(tanh.inputs[0], spelling) if tanh is not None and word(tanh) == "tanh" else None
    number = spelling.number(scale, "other", 1) if scale is not None else None
    if scale is None or not number or word(scale) not in ("mul", "div"):
        return None, 0.0
    inverse = number if word(scale) == "div" else 1 / number
    product = _alone(scale.inputs[0], spelling)
    return (product, cap) if cap > 0 and math.isclose(inverse, cap) else (None, 0.0)


def _alone(name: str, spelling: Spelling) -> Operator | None:
    """The maker of a value before its casts and the shape of its rows, which nothing else reads."""
    width = spelling.shape(name)[-1:]
    while spelling.reader(name) is not None:
        maker = spelling.makers.get(name)
        shaped = maker is not None and word(maker) in _SHAPED
        if maker is None or not (shaped or spelling.casts(maker)):
            return maker
        if spelling.shape(maker.inputs[0])[-1:] != width:
            return None
        name = maker.inputs[0]
    return None


def _apart(target: str, rows: tuple[int, ...], spelling: Spelling) -> str:
    """The target with a dim for each of the rows', if it was flattened; else as it is."""
    name = target
    while (maker := spelling.maker(name, *_IDLE)) is not None:
        if spelling.shape(name) == rows:
            break
        name = maker.inputs[0]
    same = spelling.shape(name) == rows and spelling.dtype(name) == spelling.dtype(target)
    return name if same else target
