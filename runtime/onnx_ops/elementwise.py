"""Operators that act on every element alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
import torch.nn.functional as F

from .dtypes import float_limits
from .unsigned import UNSIGNED, choosing, comparing, divide, remainder, wrapping

Tensor = torch.Tensor
maximum = choosing(torch.maximum)
minimum = choosing(torch.minimum)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """An operator of one input, whatever name ONNX gives that."""

    def call(**arguments: Tensor) -> Tensor:
        (value,) = arguments.values()
        return function(value)

    return call


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """An operator of the inputs A and B."""

    def call(*, A: Tensor, B: Tensor) -> Tensor:
        return function(A, B)

    return call


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """An operator of any number of inputs, taken two by two from the first."""

    def call(*, data_0: tuple[Tensor, ...]) -> Tensor:
        return reduce(function, data_0)

    return call


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """The quotient; integers are rounded towards zero."""
    return a / b if a.is_floating_point() or a.is_complex() else divide(a, b)


def _mean(*, data_0: tuple[Tensor, ...]) -> Tensor:
    return reduce(torch.add, data_0) / len(data_0)


def power(*, X: Tensor, Y: Tensor) -> Tensor:
    """X to the power of Y, in the dtype of X."""
    # An integer to a fractional power is computed in floats, and cut back.
    if X.is_floating_point() or not Y.is_floating_point():
        return torch.pow(X, Y.to(X.dtype))
    return torch.pow(X.to(Y.dtype), Y).to(X.dtype)


def modulo(*, A: Tensor, B: Tensor, fmod: int = 0) -> Tensor:
    """The remainder with the sign of the dividend (`fmod`) or of the divisor."""
    return torch.fmod(A, B) if fmod else remainder(A, B)


def clip(
    *, input: Tensor, min: Tensor | float | None = None, max: Tensor | float | None = None
) -> Tensor:
    """Values below `min` become `min`, those above `max` become `max`."""
    for bound, function in ((min, maximum), (max, minimum)):
        if bound is None:
            continue
        if isinstance(bound, torch.Tensor) or input.dtype in UNSIGNED:
            limit = torch.as_tensor(bound, dtype=input.dtype, device=input.device)
            input = function(input, limit)
            continue
        # A bound of the whole range, which old files have by default, would not convert.
        low, high = float_limits(input.dtype)
        if low < bound < high:
            input = input.clamp(min=bound) if function is maximum else input.clamp(max=bound)
    return input


def gelu(*, X: Tensor, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit."""
    return F.gelu(X, approximate=approximate)


def leaky_relu(*, X: Tensor, alpha: float = 0.01) -> Tensor:
    """The value x, or alpha x where negative."""
    return torch.where(X < 0, X * alpha, X)


def parametric_relu(*, X: Tensor, slope: Tensor) -> Tensor:
    """The value x, or slope x where negative."""
    return torch.where(X < 0, X * slope, X)


def elu(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """The value x, or alpha (exp(x) - 1) where negative."""
    return F.elu(X, alpha=alpha)


def celu(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """The sum max(0, x) + min(0, alpha (exp(x / alpha) - 1))."""
    return X.clamp(min=0) + (alpha * torch.expm1(X / alpha)).clamp(max=0)


def selu(*, X: Tensor, alpha: float = 1.6732632, gamma: float = 1.0507010) -> Tensor:
    """The value gamma x, or gamma alpha (exp(x) - 1) where negative."""
    # Clamped first: `where` differentiates both branches, and an overflow would make NaN.
    return gamma * torch.where(X > 0, X, alpha * torch.expm1(X.clamp(max=0)))


def hard_sigmoid(*, X: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """The line alpha x + beta between 0 and 1."""
    return (alpha * X + beta).clamp(0, 1)


def thresholded_relu(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """The value x where it is above alpha, else 0."""
    return X * (alpha < X)


def shrink(*, input: Tensor, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """Move values beyond lambd towards zero by bias, and the others to zero."""
    zero = torch.zeros_like(input)
    return torch.where(input < -lambd, input + bias, torch.where(input > lambd, input - bias, zero))


def swish(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """The product x sigmoid(alpha x)."""
    return X * torch.sigmoid(alpha * X)


def is_infinite(*, X: Tensor, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Whether a value is one of the infinities asked for."""
    infinite = torch.isinf(X)
    if not detect_negative:
        infinite = infinite & ~(X < 0)
    return infinite if detect_positive else infinite & ~(X > 0)


def bit_shift(*, X: Tensor, Y: Tensor, direction: str) -> Tensor:
    """Shift bits left or right."""
    # Torch shifts no unsigned integers; 64 signed bits hold those that ONNX allows.
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    return shift(X.to(torch.int64), Y.to(torch.int64)).to(X.dtype)


def where(*, condition: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    """X where the condition holds, else Y."""
    return torch.where(condition, X, Y)


def dropout(
    *, data: Tensor, ratio: float = 0.5, training_mode: bool = False, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Zero elements at random while training; also says which stay."""
    if not training_mode or not ratio:
        return data, torch.ones_like(data, dtype=torch.bool)
    # In float32: half precision has too few numbers between 0 and 1 for an exact rate.
    mask = torch.rand_like(data, dtype=torch.float32) >= ratio
    return data * mask / (1 - ratio), mask


def swiglu(*, A: Tensor, B: Tensor, alpha: float = 1.0) -> Tensor:
    """The product A sigmoid(alpha A) B."""
    return A * torch.sigmoid(alpha * A) * B


def _identity(x: Tensor) -> Tensor:
    return x


def _round(x: Tensor) -> Tensor:
    return torch.round(x) if x.is_floating_point() else x


_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": wrapping(torch.bitwise_not),
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": _identity,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": _round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": wrapping(torch.add),
    "Sub": wrapping(torch.sub),
    "Mul": wrapping(torch.mul),
    "Div": _divide,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "Equal": torch.eq,
    "Less": comparing(torch.lt),
    "LessOrEqual": comparing(torch.le),
    "Greater": comparing(torch.gt),
    "GreaterOrEqual": comparing(torch.ge),
    "BitwiseAnd": wrapping(torch.bitwise_and),
    "BitwiseOr": wrapping(torch.bitwise_or),
    "BitwiseXor": wrapping(torch.bitwise_xor),
}

FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    "Sum": _variadic(wrapping(torch.add)),
    "Max": _variadic(maximum),
    "Min": _variadic(minimum),
    "Mean": _mean,
    "Pow": power,
    "Mod": modulo,
    "Clip": clip,
    "Gelu": gelu,
    "LeakyRelu": leaky_relu,
    "PRelu": parametric_relu,
    "Elu": elu,
    "Celu": celu,
    "Selu": selu,
    "HardSigmoid": hard_sigmoid,
    "ThresholdedRelu": thresholded_relu,
    "Shrink": shrink,
    "Swish": swish,
    "IsInf": is_infinite,
    "BitShift": bit_shift,
    "Where": where,
    "Dropout": dropout,
    "SwiGLU": swiglu,
}
