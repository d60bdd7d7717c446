"""Recurrent layers: RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "softplus": F.softplus,
    "softsign": F.softsign,
}
Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _functions(
    names: Sequence[str] | None, default: Sequence[str], direction: int
) -> list[Callable[[Tensor], Tensor]]:
    """The activations of one direction, by their names; ONNX lists those of both in a row."""
    chosen = list(names or default)
    # One list of names serves both directions.
    chosen = chosen * 2 if len(chosen) == len(default) else chosen
    picked = chosen[direction * len(default) : (direction + 1) * len(default)]
    unknown = [name for name in picked if name.lower() not in _ACTIVATIONS]
    if unknown:
        raise ValueError(
            f"unknown activation {unknown[0]!r}: valid are {', '.join(sorted(_ACTIVATIONS))}"
        )
    return [_ACTIVATIONS[name.lower()] for name in picked]


def _clipped(x: Tensor, clip: float | None) -> Tensor:
    return x if clip is None else x.clamp(-clip, clip)


def _scan(
    x: Tensor, states: tuple[Tensor, ...], lengths: Tensor | None, reverse: bool, step: Step
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Step over the first dim; a sequence that has ended keeps its state and gives zeros."""
    outputs: list[Tensor] = []
    order = range(x.shape[0])
    for t in reversed(order) if reverse else order:
        new = step(x[t], states)
        if lengths is not None:
            # Padding behind a sequence must not change its last state, whichever way it is read.
            alive = (t < lengths).unsqueeze(1)
            states = tuple(
                torch.where(alive, fresh, old) for fresh, old in zip(new, states, strict=True)
            )
            outputs.append(torch.where(alive, new[0], torch.zeros_like(new[0])))
        else:
            states = new
            outputs.append(new[0])
    return torch.stack(outputs[::-1] if reverse else outputs), states


def _run(
    X: Tensor,
    initial: Sequence[Tensor | None],
    hidden: int,
    cell: Callable[[int], Step],
    *,
    sequence_lens: Tensor | None = None,
    direction: str = "forward",
    layout: int = 0,
    hidden_size: int | None = None,
) -> tuple[Tensor, ...]:
    """All directions of a layer: the outputs and the last states, in ONNX's layouts.

    layout: 0 with the sequence first, 1 with the batch first. `hidden_size` is that of the weights.
    """
    # The steps run over the first dim.
    x = X.transpose(0, 1) if layout else X
    directions = [False, True] if direction == "bidirectional" else [direction == "reverse"]
    outputs = []
    finals = []
    for index, reverse in enumerate(directions):
        states = []
        for state in initial:
            if state is None:
                states.append(X.new_zeros(x.shape[1], hidden))
            else:
                states.append((state.transpose(0, 1) if layout else state)[index])
        y, last = _scan(x, tuple(states), sequence_lens, reverse, cell(index))
        outputs.append(y)
        finals.append(last)
    y = torch.stack(outputs, dim=1)
    states_out = [torch.stack(parts) for parts in zip(*finals, strict=True)]
    if layout:
        return (y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states_out))
    return (y, *states_out)


def _biases(B: Tensor | None, index: int, gates: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The biases of inputs and of states in one direction, zeros where there are none."""
    if B is None:
        zero = like.new_zeros(gates)
        return zero, zero
    return B[index, :gates], B[index, gates:]


def rnn(
    *,
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    initial_h: Tensor | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    **order: Any,
) -> tuple[Tensor, ...]:
    """A plain recurrent layer."""
    hidden = R.shape[-1]

    def cell(index: int) -> Step:
        (f,) = _functions(activations, ("Tanh",), index)
        wb, rb = _biases(B, index, hidden, X)

        def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (f(_clipped(x @ W[index].t() + state[0] @ R[index].t() + wb + rb, clip)),)

        return step

    return _run(X, [initial_h], hidden, cell, **order)


def gru(
    *,
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    initial_h: Tensor | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    linear_before_reset: int = 0,
    **order: Any,
) -> tuple[Tensor, ...]:
    """A gated recurrent layer; gates in the order update, reset, hidden."""
    hidden = R.shape[-1]

    def cell(index: int) -> Step:
        f, g = _functions(activations, ("Sigmoid", "Tanh"), index)
        wb, rb = _biases(B, index, 3 * hidden, X)

        def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (h,) = state
            xz, xr, xh = (x @ W[index].t() + wb).chunk(3, dim=-1)
            rz, rr, rh = R[index].chunk(3)
            bz, br, bh = rb.chunk(3)
            update = f(_clipped(xz + h @ rz.t() + bz, clip))
            reset = f(_clipped(xr + h @ rr.t() + br, clip))
            # The two orders differ in the last bits and in what the reset gate multiplies.
            inner = reset * (h @ rh.t() + bh) if linear_before_reset else (reset * h) @ rh.t() + bh
            return ((1 - update) * g(_clipped(xh + inner, clip)) + update * h,)

        return step

    return _run(X, [initial_h], hidden, cell, **order)


def lstm(
    *,
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    P: Tensor | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    input_forget: int = 0,
    **order: Any,
) -> tuple[Tensor, ...]:
    """A long short-term memory layer with peepholes `P`.

    The gates stand in the order input, output, forget, cell.
    """
    hidden = R.shape[-1]

    def cell(index: int) -> Step:
        f, g, h = _functions(activations, ("Sigmoid", "Tanh", "Tanh"), index)
        wb, rb = _biases(B, index, 4 * hidden, X)
        peeps = (X.new_zeros(3 * hidden) if P is None else P[index]).chunk(3)

        def step(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            previous, memory = state
            gates = x @ W[index].t() + previous @ R[index].t() + wb + rb
            i, o, forget, c = gates.chunk(4, dim=-1)
            i = f(_clipped(i + peeps[0] * memory, clip))
            forget = 1 - i if input_forget else f(_clipped(forget + peeps[2] * memory, clip))
            memory = forget * memory + i * g(_clipped(c, clip))
            return f(_clipped(o + peeps[1] * memory, clip)) * h(memory), memory

        return step

    return _run(X, [initial_h, initial_c], hidden, cell, **order)


FUNCTIONS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}
