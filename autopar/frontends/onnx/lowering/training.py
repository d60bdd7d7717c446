"""Steps of optimizers on tensors, their gradients and their states.

ONNX passes all tensors, then all gradients, then all states of each kind in one list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.errors import ModelError, unknown

from .symbols import Symbol, where

Symbols = tuple[Symbol, ...]


def _rows(inputs: Symbols, count: int) -> list[Symbols]:
    """Each tensor of an optimizer with its gradient and its states."""
    size = len(inputs) // count
    return [inputs[i::size] for i in range(size)]


def _columns(rows: list[Symbols]) -> Symbols:
    """Rows of results in ONNX's order: all first ones, then all second ones, and so on."""
    return tuple(item for column in zip(*rows, strict=True) for item in column)


def adagrad(
    *,
    R: Symbol,
    T: Symbol,
    inputs: Symbols,
    decay_factor: float = 0.0,
    epsilon: float = 0.0,
    norm_coefficient: float = 0.0,
) -> Symbols:
    """New tensors, then the new sums of squared gradients."""
    rate = R / (T * decay_factor + 1)
    rows: list[Symbols] = []
    for x, g, h in _rows(inputs, 3):
        g = x * norm_coefficient + g
        squares = h + g * g
        rows.append((x - rate * g / (squares.map("sqrt") + epsilon), squares))
    return _columns(rows)


def adam(
    *,
    R: Symbol,
    T: Symbol,
    inputs: Symbols,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 0.0,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> Symbols:
    """New tensors, then the new means of the gradients, then those of their squares."""
    # The first step, 0, is not corrected; clamped, since its correction would divide by zero.
    step = T.clamp(1).to(R.dtype)

    def rest(base: float) -> Symbol:
        return 1 - step.new("pow.Scalar", self=base, exponent=step)

    rate = where(T > 0, R * rest(beta).map("sqrt") / rest(alpha), R)
    rows: list[Symbols] = []
    for x, g, v, h in _rows(inputs, 4):
        g = x * norm_coefficient + g
        mean = v * alpha + g * (1 - alpha)
        square = h * beta + g * g * (1 - beta)
        new = x - rate * (mean / (square.map("sqrt") + epsilon))
        rows.append((new * (1 - norm_coefficient_post), mean, square))
    return _columns(rows)


def momentum(
    *,
    R: Symbol,
    T: Symbol,
    inputs: Symbols,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> Symbols:
    """New tensors, then the new momenta; `mode` is standard or nesterov."""
    if mode not in ("standard", "nesterov"):
        raise ModelError(unknown("mode", mode, ("standard", "nesterov")))
    rows: list[Symbols] = []
    for x, g, v in _rows(inputs, 3):
        g = x * norm_coefficient + g
        # The first gradient enters the momentum in full.
        new = v * alpha + where(T > 0, g * beta, g)
        rows.append((x - R * (g + new * alpha if mode == "nesterov" else new), new))
    return _columns(rows)


_DOMAIN = "ai.onnx.preview.training"
FUNCTIONS: Mapping[str, Callable[..., Symbols]] = {
    f"{_DOMAIN}.Adagrad": adagrad,
    f"{_DOMAIN}.Adam": adam,
    f"{_DOMAIN}.Momentum": momentum,
}
