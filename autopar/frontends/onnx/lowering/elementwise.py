"""Operators that act on every element alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np

from .symbols import Number, Symbol, is_float, where

Function = Callable[..., Symbol]
_UNSIGNED = ("uint16", "uint32", "uint64")


def signed(function: Function, *, returns: bool = True) -> Function:
    """`function` for the unsigned integers, too, that torch stores but does not compute with.

    They become 64 signed bits and go back, so what is added or multiplied wraps as it should, and
    numbers below 2^63 are exact in all else. `returns`: whether the result is of their type.
    """

    def call(first: Symbol, *rest: Symbol) -> Symbol:
        if first.dtype not in _UNSIGNED:
            return function(first, *rest)
        made = function(first.to("int64"), *(x.to("int64") for x in rest))
        return made.to(first.dtype) if returns else made

    return call


def truncated(a: Symbol, b: Symbol | int) -> Symbol:
    """The quotient of signed integers, rounded towards zero."""
    return a.with_other("div.Tensor_mode", b, rounding_mode="trunc")


maximum = signed(lambda a, b: a.with_other("maximum.default", b))
minimum = signed(lambda a, b: a.with_other("minimum.default", b))


def limits(dtype: str) -> tuple[float, float]:
    """The lowest and highest value of an element type."""
    if dtype == "bfloat16":
        return -3.3895313892515355e38, 3.3895313892515355e38
    info = np.finfo(dtype) if is_float(dtype) else np.iinfo(dtype)
    return float(info.min), float(info.max)


def _unary(function: Function) -> Callable[..., Symbol]:
    """An operator of one input, whatever name ONNX gives that."""
    return lambda **arguments: function(*arguments.values())


def _binary(function: Function) -> Callable[..., Symbol]:
    """An operator of the inputs A and B."""
    return lambda *, A, B: function(A, B)


def _variadic(function: Function) -> Callable[..., Symbol]:
    """An operator of any number of inputs, taken two by two from the first."""
    return lambda *, data_0: reduce(function, data_0)


def _divide(a: Symbol, b: Symbol) -> Symbol:
    """The quotient; integers are rounded towards zero."""
    return signed(truncated)(a, b) if "int" in a.dtype else a / b


def power(*, X: Symbol, Y: Symbol) -> Symbol:
    """X to the power of Y, in the type of X."""
    # An integer to a fractional power is computed in floats, and cut back.
    if X.floating or not Y.floating:
        return X ** Y.to(X.dtype)
    return (X.to(Y.dtype) ** Y).to(X.dtype)


def modulo(*, A: Symbol, B: Symbol, fmod: int = 0) -> Symbol:
    """The remainder with the sign of the dividend (`fmod`) or of the divisor."""
    return signed(_operator("fmod.Tensor" if fmod else "remainder.Tensor"))(A, B)


def clip(
    *, input: Symbol, min: Symbol | Number | None = None, max: Symbol | Number | None = None
) -> Symbol:
    """Values below `min` become `min`, those above `max` become `max`."""
    for bound, choose, upper in ((min, maximum, False), (max, minimum, True)):
        if isinstance(bound, Symbol):
            input = choose(input, bound)
        elif bound is not None and input.dtype in _UNSIGNED:
            input = choose(input, input.constant(np.array(bound, input.dtype)))
        # A bound of the whole range, which old files have by default, would not convert.
        elif bound is not None and limits(input.dtype)[0] < bound < limits(input.dtype)[1]:
            input = input.clamp(high=bound) if upper else input.clamp(low=bound)
    return input


def gelu(*, X: Symbol, approximate: str = "none") -> Symbol:
    """The Gaussian error linear unit."""
    return X.map("gelu", approximate=None if approximate == "none" else approximate)


def shrink(*, input: Symbol, bias: float = 0.0, lambd: float = 0.5) -> Symbol:
    """Move values beyond lambd towards zero by bias, and the others to zero."""
    low = where(input < -lambd, input + bias, 0)
    return where(input > lambd, input - bias, low).to(input.dtype)


def swish(*, X: Symbol, alpha: float = 1.0) -> Symbol:
    """The product x sigmoid(alpha x)."""
    return X.map("silu") if alpha == 1 else X * (X * alpha).map("sigmoid")


def is_infinite(*, X: Symbol, detect_negative: int = 1, detect_positive: int = 1) -> Symbol:
    """Whether a value is one of the infinities asked for."""
    infinite = X.map("isinf", "bool")
    if not detect_negative:
        infinite = infinite & (X >= 0)
    return infinite if detect_positive else infinite & (X <= 0)


def bit_shift(*, X: Symbol, Y: Symbol, direction: str) -> Symbol:
    """Shift bits left or right."""
    # Torch shifts no unsigned integers; 64 signed bits hold those that ONNX allows.
    name = "left" if direction == "LEFT" else "right"
    shifted = X.to("int64").with_other(f"bitwise_{name}_shift.Tensor", Y.to("int64"))
    return shifted.to(X.dtype)


def dropout(
    *,
    data: Symbol,
    ratio: Symbol | float = 0.5,
    training_mode: Symbol | bool = False,
    seed: int | None = None,
) -> tuple[Symbol, ...]:
    """Zero elements at random while training; also says which stay."""
    if training_mode and (isinstance(training_mode, Symbol) or isinstance(ratio, Symbol)):
        # What only a run knows: the rate is zero where it does not train.
        rate = training_mode.to(data.dtype) if isinstance(training_mode, Symbol) else 1.0
        rate = rate * ratio
        # In float32: half precision has too few numbers between 0 and 1 for an exact rate.
        draws = data.to("float32").map("rand_like")
        stay = draws >= (rate.to("float32") if isinstance(rate, Symbol) else rate)
        return data * stay.to(data.dtype) / (1 - rate), stay
    if not training_mode or not ratio:
        return data, data.map("ones_like", "bool", dtype="bool")
    results = [(data.shape, data.dtype), (data.shape, "bool")]
    return data.several("native_dropout.default", results, input=data, p=ratio, train=True)


def softsign(x: Symbol) -> Symbol:
    """The quotient x / (1 + |x|)."""
    return x / (x.map("abs") + 1)


def named(name: str, dtype: str | None = None) -> Function:
    """The operator of every element that aten calls so."""
    return lambda x: x.map(name, dtype)


def _operator(name: str) -> Function:
    return lambda a, b: a.with_other(name, b)


def _compared(name: str) -> Function:
    return lambda a, b: a.compared(name, b)


_SAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor HardSwish Log Mish Neg "
    "Reciprocal Relu Sigmoid Sign Sin Sinh Softplus Sqrt Tan Tanh"
)
FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    **{name: _unary(named(name.lower())) for name in _SAME.split()},
    "BitwiseNot": _unary(signed(named("bitwise_not"))),
    "Identity": _unary(lambda x: x),
    "IsNaN": _unary(named("isnan", "bool")),
    "Not": _unary(named("logical_not")),
    "Round": _unary(lambda x: x.map("round") if x.floating else x),
    "Softsign": _unary(softsign),
    "Add": _binary(signed(Symbol.__add__)),
    "Sub": _binary(signed(Symbol.__sub__)),
    "Mul": _binary(signed(Symbol.__mul__)),
    "Div": _binary(_divide),
    **{
        name: _binary(_operator(f"logical_{name.lower()}.default")) for name in ("And", "Or", "Xor")
    },
    "Equal": _binary(_compared("eq")),
    "Less": _binary(signed(_compared("lt"), returns=False)),
    "LessOrEqual": _binary(signed(_compared("le"), returns=False)),
    "Greater": _binary(signed(_compared("gt"), returns=False)),
    "GreaterOrEqual": _binary(signed(_compared("ge"), returns=False)),
    **{
        f"Bitwise{name}": _binary(signed(_operator(f"bitwise_{name.lower()}.Tensor")))
        for name in ("And", "Or", "Xor")
    },
    "Sum": _variadic(signed(Symbol.__add__)),
    "Max": _variadic(maximum),
    "Min": _variadic(minimum),
    "Mean": lambda *, data_0: reduce(Symbol.__add__, data_0) / len(data_0),
    "Pow": power,
    "Mod": modulo,
    "Clip": clip,
    "Gelu": gelu,
    "LeakyRelu": lambda *, X, alpha=0.01: X.map("leaky_relu", negative_slope=alpha),
    "PRelu": lambda *, X, slope: where(X < 0, X * slope, X),
    "Elu": lambda *, X, alpha=1.0: X.map("elu", alpha=alpha),
    "Celu": lambda *, X, alpha=1.0: X.map("celu", alpha=alpha),
    "Selu": lambda *, X, alpha, gamma: X.map("elu", alpha=alpha, scale=gamma),
    "HardSigmoid": lambda *, X, alpha=0.2, beta=0.5: (X * alpha + beta).clamp(0, 1),
    "ThresholdedRelu": lambda *, X, alpha=1.0: X * (alpha < X),
    "Shrink": shrink,
    "Swish": swish,
    "IsInf": is_infinite,
    "BitShift": bit_shift,
    "Where": lambda *, condition, X, Y: where(condition, X, Y),
    "Dropout": dropout,
    "SwiGLU": lambda *, A, B, alpha=1.0: swish(X=A, alpha=alpha) * B,
}
