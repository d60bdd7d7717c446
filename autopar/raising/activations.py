"""Activations that an exporter spells out.

    gelu        0.5 x (1 + erf(x / sqrt(2)))
    by tanh     0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    silu        x sigmoid(x)

Source: D. Hendrycks and K. Gimpel, Gaussian Error Linear Units, 2016.
"""

from __future__ import annotations

import math
from collections import Counter

from autopar.ir import Operator, Ref

from .spelling import Spelling, beside, word

CLOSE = 1e-4
"""The relative error up to which a written constant is the one that is meant."""


def activation(operator: Operator, spelling: Spelling) -> Operator | None:
    """The activation of which an operator is the last product."""
    if word(operator) != "mul" or not spelling.tensors[operator.outputs[0]].is_float:
        return None
    scale, factors = _product(operator.outputs[0], spelling)
    if sorted(factors.values()) != [1, 1]:
        return None
    made = operator.outputs[0]
    for x, other in (tuple(factors), tuple(factors)[::-1]):
        approximate = _gelu(x, other, scale, spelling)
        sigmoid = spelling.maker(other, "sigmoid") if scale == 1.0 else None
        silu = sigmoid is not None and sigmoid.inputs[0] == x
        # A constant of one element may have more dims than x.
        alike = len({(spelling.shape(name), spelling.dtype(name)) for name in (x, made)}) == 1
        if alike and (approximate or silu):
            name = "gelu" if approximate else "silu"
            given = {"approximate": approximate} if approximate else {}
            return Operator(
                name=beside(operator, name),
                kind=f"aten.{name}.default",
                inputs=(x,),
                outputs=operator.outputs,
                attributes={"self": Ref(0), **given},
            )
    return None


def _gelu(x: str, other: str, scale: float, spelling: Spelling) -> str:
    """How the gelu of x is approximated, if `other` is the rest of it; else empty."""
    curve = _one_more(other, spelling) if math.isclose(scale, 0.5, rel_tol=CLOSE) else None
    maker = spelling.maker(curve or "", "erf", "tanh")
    if maker is None:
        return ""
    inner, factors = _product(maker.inputs[0], spelling)
    if word(maker) == "erf":
        plain = factors == {x: 1} and math.isclose(inner, math.sqrt(0.5), rel_tol=CLOSE)
        return "none" if plain else ""
    cubic = _is_cubic(x, factors, spelling)
    cubic = cubic and math.isclose(inner, math.sqrt(2 / math.pi), rel_tol=CLOSE)
    return "tanh" if cubic else ""


def _is_cubic(x: str, factors: Counter[str], spelling: Spelling) -> bool:
    """Whether a product of factors is x + 0.044715 x^3, or x (1 + 0.044715 x^2)."""
    rest = factors - Counter({x: 1})
    names = list(rest.elements())
    if len(names) != 1:
        return False
    one = _one_more(names[0], spelling)
    if factors[x] and one is not None:
        return _is_term(one, x, 2, spelling)
    total = spelling.maker(names[0], "add")
    if factors[x] or total is None or total.attributes.get("alpha", 1) != 1:
        return False
    return any(
        left == x and _is_term(right, x, 3, spelling) for left, right in spelling.pairs(total)
    )


def _is_term(name: str, x: str, power: int, spelling: Spelling) -> bool:
    scale, factors = _product(name, spelling)
    return factors == {x: power} and math.isclose(scale, 0.044715, rel_tol=CLOSE)


def _one_more(name: str, spelling: Spelling) -> str | None:
    """The tensor that a value is one more than."""
    total = spelling.maker(name, "add")
    if total is None or total.attributes.get("alpha", 1) != 1:
        return None
    # One is a number of the call, or a tensor on either side.
    for place in range(len(total.inputs) if len(total.inputs) == 2 else 1):
        if spelling.number(total, "other", 1 - place) == 1.0:
            return total.inputs[place]
    return None


def _product(name: str, spelling: Spelling) -> tuple[float, Counter[str]]:
    """The number and the tensors, each with its exponent, of which a value is the product."""
    maker = spelling.makers.get(name)
    said = word(maker) if maker is not None and maker.inputs else ""
    if maker is None or said not in ("mul", "div", "pow"):
        return 1.0, Counter((name,))
    if said == "pow":
        exponent = spelling.number(maker, "exponent", 1) or 0.0
        if exponent not in (2.0, 3.0):
            return 1.0, Counter((name,))
        scale, factors = _product(maker.inputs[0], spelling)
        return scale**exponent, Counter({n: int(exponent) * f for n, f in factors.items()})
    for place in range(len(maker.inputs)):
        number = spelling.number(maker, "other", 1 - place)
        if number and (said == "mul" or place == 0):
            scale, factors = _product(maker.inputs[place], spelling)
            return scale * (number if said == "mul" else 1 / number), factors
    if said == "div" or len(maker.inputs) != 2:
        return 1.0, Counter((name,))
    (left, one), (right, other) = (_product(side, spelling) for side in maker.inputs)
    return left * right, one + other
