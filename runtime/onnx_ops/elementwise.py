"""Operators that act on every element alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
import torch.nn.functional as F

from .dtypes import float_limits
from .unsigned import UNSIGNED, choosing, comparing, divide, remainder, wrapping

Tensor = torch.Tensor
maximum, minimum = choosing(torch.maximum), choosing(torch.minimum)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def call(**arguments: Tensor) -> Tensor:
        (value,) = arguments.values()
        return function(value)

    return call


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def call(*, A: Tensor, B: Tensor) -> Tensor:
        return function(A, B)

    return call


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def call(*, data_0: tuple[Tensor, ...]) -> Tensor:
        return reduce(function, data_0)

    return call


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() or a.is_complex() else divide(a, b)


def _mean(*, data_0: tuple[Tensor, ...]) -> Tensor:
    return reduce(torch.add, data_0) / len(data_0)


def power(*, X: Tensor, Y: Tensor) -> Tensor:
    """X to the power of Y, in the dtype of X."""
    if X.is_floating_point() or not Y.is_floating_point():
        return torch.pow(X, Y.to(X.dtype))
    return torch.pow(X.to(Y.dtype), Y).to(X.dtype)


def modulo(*, A: Tensor, B: Tensor, fmod: int = 0) -> Tensor:
    """The remainder with the sign of the dividend (`fmod`) or of the divisor."""
    return torch.fmod(A, B) if fmod else remainder(A, B)


def clip(*, input: Tensor, min: Tensor | float | None = None, max: Tensor | float | None = None) -> Tensor:
    """Values below `min` become `min`, above `max` `max`."""
    for bound, function in ((min, maximum), (max, minimum)):
        if isinstance(bound, torch.Tensor) or input.dtype in UNSIGNED:
            input = input if bound is None else function(input, torch.as_tensor(bound, dtype=input.dtype, device=input.device))
        elif bound is not None:
            low, high = float_limits(input.dtype)
            if low < bound < high:  # a bound of the whole range, which old files have by default, would not convert
                input = input.clamp(min=bound) if function is maximum else input.clamp(max=bound)
    return input


def gelu(*, X: Tensor, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit."""
    return F.gelu(X, approximate=approximate)


def leaky_relu(*, X: Tensor, alpha: float = 0.01) -> Tensor:
    """x, or alpha x where negative."""
    return torch.where(X < 0, X * alpha, X)


def parametric_relu(*, X: Tensor, slope: Tensor) -> Tensor:
    """x, or slope x where negative."""
    return torch.where(X < 0, X * slope, X)


def elu(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """x, or alpha (exp(x) - 1) where negative."""
    return F.elu(X, alpha=alpha)


def celu(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """max(0, x) + min(0, alpha (exp(x / alpha) - 1))."""
    return X.clamp(min=0) + (alpha * torch.expm1(X / alpha)).clamp(max=0)


def selu(*, X: Tensor, alpha: float = 1.6732632, gamma: float = 1.0507010) -> Tensor:
    """gamma times x, or alpha (exp(x) - 1) where negative."""
    return gamma * torch.where(X > 0, X, alpha * torch.expm1(X.clamp(max=0)))


def hard_sigmoid(*, X: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """max(0, min(1, alpha x + beta))."""
    return (alpha * X + beta).clamp(0, 1)


def thresholded_relu(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """x where above alpha, else 0."""
    return X * (alpha < X)


def shrink(*, input: Tensor, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """Moves values beyond lambd towards zero by bias, and the others to zero."""
    zero = torch.zeros_like(input)
    return torch.where(input < -lambd, input + bias, torch.where(input > lambd, input - bias, zero))


def swish(*, X: Tensor, alpha: float = 1.0) -> Tensor:
    """x sigmoid(alpha x)."""
    return X * torch.sigmoid(alpha * X)


def is_infinite(*, X: Tensor, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Whether a value is one of the infinities asked for."""
    found = torch.isinf(X)
    if not detect_negative:
        found = found & ~(X < 0)
    return found if detect_positive else found & ~(X > 0)


def bit_shift(*, X: Tensor, Y: Tensor, direction: str) -> Tensor:
    """Shifts bits left or right."""
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    return shift(X.to(torch.int64), Y.to(torch.int64)).to(X.dtype)


def where(*, condition: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    """X where the condition holds, else Y."""
    return torch.where(condition, X, Y)


def dropout(*, data: Tensor, ratio: float = 0.5, training_mode: bool = False, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Zeroes elements at random while training, and says which stay."""
    if not training_mode or not ratio:
        return data, torch.ones_like(data, dtype=torch.bool)
    mask = torch.rand_like(data, dtype=torch.float32) >= ratio
    return data * mask / (1 - ratio), mask


def swiglu(*, A: Tensor, B: Tensor, alpha: float = 1.0) -> Tensor:
    """A sigmoid(alpha A) B."""
    return A * torch.sigmoid(alpha * A) * B


def _identity(x: Tensor) -> Tensor:
    return x


def _round(x: Tensor) -> Tensor:
    return torch.round(x) if x.is_floating_point() else x


_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh, "Atan": torch.atan,
    "Atanh": torch.atanh, "BitwiseNot": wrapping(torch.bitwise_not), "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish, "Identity": _identity, "IsNaN": torch.isnan,
    "Log": torch.log, "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Round": _round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": F.softplus,
    "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": wrapping(torch.add), "Sub": wrapping(torch.sub), "Mul": wrapping(torch.mul), "Div": _divide, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "Equal": torch.eq, "Less": comparing(torch.lt), "LessOrEqual": comparing(torch.le),
    "Greater": comparing(torch.gt), "GreaterOrEqual": comparing(torch.ge), "BitwiseAnd": wrapping(torch.bitwise_and),
    "BitwiseOr": wrapping(torch.bitwise_or), "BitwiseXor": wrapping(torch.bitwise_xor),
}  # fmt: skip

FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    "Sum": _variadic(wrapping(torch.add)), "Max": _variadic(maximum), "Min": _variadic(minimum), "Mean": _mean,
    "Pow": power, "Mod": modulo, "Clip": clip, "Gelu": gelu, "LeakyRelu": leaky_relu, "PRelu": parametric_relu, "Elu": elu, "Celu": celu,
    "Selu": selu, "HardSigmoid": hard_sigmoid, "ThresholdedRelu": thresholded_relu, "Shrink": shrink, "Swish": swish, "IsInf": is_infinite,
    "BitShift": bit_shift, "Where": where, "Dropout": dropout, "SwiGLU": swiglu,
}  # fmt: skip
