"""Steps of optimizers on tensors, their gradients and their states.

ONNX passes all tensors, then all gradients, then all states of each kind in one list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]


def _rows(inputs: Tensors, count: int) -> list[Tensors]:
    """Each tensor of an optimizer with its gradient and its states."""
    size = len(inputs) // count
    return [inputs[i::size] for i in range(size)]


def _columns(rows: list[Tensors]) -> Tensors:
    """Rows of results in ONNX's order: all first ones, then all second ones, and so on."""
    return tuple(item for column in zip(*rows, strict=True) for item in column)


def adagrad(
    *,
    R: Tensor,
    T: Tensor,
    inputs: Tensors,
    decay_factor: float = 0.0,
    epsilon: float = 0.0,
    norm_coefficient: float = 0.0,
) -> Tensors:
    """New tensors, then the new sums of squared gradients."""
    rate = R / (1 + T * decay_factor)
    rows: list[Tensors] = []
    for x, g, h in _rows(inputs, 3):
        g = norm_coefficient * x + g
        squares = h + g * g
        rows.append((x - rate * g / (squares.sqrt() + epsilon), squares))
    return _columns(rows)


def adam(
    *,
    R: Tensor,
    T: Tensor,
    inputs: Tensors,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 0.0,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> Tensors:
    """New tensors, then the new means of the gradients, then those of their squares."""
    # The first step, 0, is not corrected; clamped, since its correction would divide by zero.
    step = T.clamp(min=1).to(R.dtype)
    rate = torch.where(T > 0, R * torch.sqrt(1 - beta**step) / (1 - alpha**step), R)
    rows: list[Tensors] = []
    for x, g, v, h in _rows(inputs, 4):
        g = norm_coefficient * x + g
        mean = alpha * v + (1 - alpha) * g
        square = beta * h + (1 - beta) * g * g
        new = x - rate * (mean / (square.sqrt() + epsilon))
        rows.append(((1 - norm_coefficient_post) * new, mean, square))
    return _columns(rows)


def momentum(
    *,
    R: Tensor,
    T: Tensor,
    inputs: Tensors,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> Tensors:
    """New tensors, then the new momenta; `mode` is standard or nesterov."""
    if mode not in ("standard", "nesterov"):
        raise ValueError(f"unknown mode {mode!r}: valid are standard, nesterov")
    # The first gradient enters the momentum in full.
    weight = torch.where(T > 0, beta, 1.0)
    rows: list[Tensors] = []
    for x, g, v in _rows(inputs, 3):
        g = norm_coefficient * x + g
        new = alpha * v + weight * g
        rows.append((x - R * (g + alpha * new if mode == "nesterov" else new), new))
    return _columns(rows)


_DOMAIN = "ai.onnx.preview.training"
FUNCTIONS: Mapping[str, Callable[..., Tensors]] = {
    f"{_DOMAIN}.Adagrad": adagrad,
    f"{_DOMAIN}.Adam": adam,
    f"{_DOMAIN}.Momentum": momentum,
}
