"""Recurrent layers: RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from autopar.errors import ModelError, unknown

from .elementwise import named, softsign
from .symbols import Symbol, cat, stack, where

LONGEST = 1024
"""Steps of a layer that torch's own does not compute, which are written out one by one."""
_ACTIVATIONS: Mapping[str, Callable[[Symbol], Symbol]] = {
    **{name: named(name) for name in ("tanh", "sigmoid", "relu", "softplus")},
    "softsign": softsign,
}
_DEFAULT = {"rnn": ("tanh",), "gru": ("sigmoid", "tanh"), "lstm": ("sigmoid", "tanh", "tanh")}
_ORDER = {"rnn": (0,), "gru": (1, 0, 2), "lstm": (0, 2, 3, 1)}
"""The places of ONNX's gates in the order that torch's layers have."""
States = tuple[Symbol, ...]


class Layer:
    """One direction of a layer: weights, biases of inputs and of states, and what its gates do."""

    def __init__(
        self,
        weights: Sequence[Symbol],
        biases: Sequence[Symbol | None],
        peeps: Sequence[Symbol],
        functions: Sequence[str],
        clip: float | None,
        late: bool,
    ) -> None:
        self.W, self.R = weights
        self.b, self.c = biases
        self.peeps = peeps
        self.functions = [_ACTIVATIONS[name] for name in functions]
        self.clip = clip
        self.late = late

    def gate(self, function: Callable[[Symbol], Symbol], x: Symbol) -> Symbol:
        """An activation of values within the layer's bounds."""
        return function(x if self.clip is None else x.clamp(-self.clip, self.clip))

    def both(self, x: Symbol, h: Symbol) -> Symbol:
        """The sum of what inputs and states give to all gates."""
        return _product(x, self.W, self.b) + _product(h, self.R, self.c)

    def rnn(self, x: Symbol, state: States) -> States:
        """h = f(W x + R h)."""
        return (self.gate(self.functions[0], self.both(x, state[0])),)

    def gru(self, x: Symbol, state: States) -> States:
        """h = (1 - z) g(W x + R (r h)) + z h; gates in the order update, reset, hidden."""
        (h,) = state
        f, g = self.functions
        xz, xr, xh = _product(x, self.W, self.b).chunk(3, -1)
        R = self.R.chunk(3, 0)
        c = (None,) * 3 if self.c is None else self.c.chunk(3, 0)
        update = self.gate(f, xz + _product(h, R[0], c[0]))
        reset = self.gate(f, xr + _product(h, R[1], c[1]))
        # The two orders differ in the last bits and in what the reset gate multiplies.
        inner = reset * _product(h, R[2], c[2]) if self.late else _product(reset * h, R[2], c[2])
        return ((1 - update) * self.gate(g, xh + inner) + update * h,)

    def lstm(self, x: Symbol, state: States) -> States:
        """c = f c + i g(W x + R h), h = o tanh(c); gates in the order input, output, forget, cell.

        `late`: the forget gate is what the input gate leaves.
        """
        previous, memory = state
        f, g, h = self.functions
        i, o, forget, c = self.both(x, previous).chunk(4, -1)
        if self.peeps:
            i = i + self.peeps[0] * memory
            forget = forget + self.peeps[2] * memory
        i = self.gate(f, i)
        forget = 1 - i if self.late else self.gate(f, forget)
        memory = forget * memory + i * self.gate(g, c)
        o = o + self.peeps[1] * memory if self.peeps else o
        return self.gate(f, o) * h(memory), memory


def _product(x: Symbol, weight: Symbol, bias: Symbol | None) -> Symbol:
    shape = (x.shape[0], weight.shape[0])
    return x.new("linear.default", shape, input=x, weight=weight, bias=bias)


def _layer(
    kind: str,
    *,
    X: Symbol,
    W: Symbol,
    R: Symbol,
    B: Symbol | None = None,
    sequence_lens: Symbol | None = None,
    initial_h: Symbol | None = None,
    initial_c: Symbol | None = None,
    P: Symbol | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    layout: int = 0,
    linear_before_reset: int = 0,
    input_forget: int = 0,
    **_: object,
) -> States:
    """All directions of a layer: the outputs and the last states, in ONNX's layouts.

    layout: 0 with the sequence first, 1 with the batch first. Weights hold a direction after
    another.
    """
    # The steps run over the first dim.
    x = _steps_first(X, layout)
    turned = {"bidirectional": (False, True), "reverse": (True,)}.get(direction, (False,))
    default = _DEFAULT[kind]
    names = [name.lower() for name in activations or default]
    # One list of names serves both directions.
    names = names * 2 if len(names) == len(default) else names
    if strange := [name for name in names if name not in _ACTIVATIONS]:
        raise ModelError(unknown("activation", strange[0], _ACTIVATIONS))
    zeros = x.constant(np.zeros((1, 1, 1), np.float32)).to(x.dtype)
    zeros = zeros.expand(len(turned), x.shape[1], R.shape[-1])
    given = [initial_h, initial_c][: 2 if kind == "lstm" else 1]
    initial = [zeros if state is None else _steps_first(state, layout) for state in given]
    late = linear_before_reset or input_forget
    layers = [
        Layer(
            [weight.select(0, i) for weight in (W, R)],
            (None, None) if B is None else B.select(0, i).chunk(2, 0),
            () if P is None else P.select(0, i).chunk(3, 0),
            names[i * len(default) : (i + 1) * len(default)],
            clip,
            bool(late),
        )
        for i in range(len(turned))
    ]
    usual = [*default] * 2 if kind != "rnn" or names[0] != "relu" else ["relu"] * 2
    odd = clip is not None or P is not None or sequence_lens is not None or turned == (True,)
    if not odd and names == usual and bool(late) == (kind == "gru"):
        made = _fused(
            kind if kind != "rnn" else f"rnn_{names[0]}", _ORDER[kind], layers, x, initial
        )
    else:
        made = _written_out(kind, layers, turned, x, initial, sequence_lens)
    if not layout:
        return made
    return (made[0].permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in made[1:]))


def _steps_first(x: Symbol, layout: int) -> Symbol:
    return x.transpose(0, 1) if layout else x


def _fused(
    name: str, order: Sequence[int], layers: Sequence[Layer], x: Symbol, initial: Sequence[Symbol]
) -> States:
    """A layer as torch's own operator."""
    parameters: list[Symbol] = []
    for layer in layers:
        for weight in (layer.W, layer.R, layer.b, layer.c):
            if weight is not None:
                gates = weight.chunk(len(order), 0) if len(order) > 1 else (weight,)
                parameters.append(cat([gates[place] for place in order], 0))
    steps, batch = x.shape[:2]
    count = len(layers)
    width = initial[0].shape[-1]
    y, *last = x.several(
        f"{name}.input",
        [((steps, batch, count * width), x.dtype)] + [(s.shape, x.dtype) for s in initial],
        input=x,
        hx=tuple(initial) if len(initial) > 1 else initial[0],
        params=tuple(parameters),
        has_biases=layers[0].b is not None,
        num_layers=1,
        dropout=0.0,
        train=False,
        bidirectional=count > 1,
        batch_first=False,
    )
    return (y.reshape(steps, batch, count, width).transpose(1, 2), *last)


def _written_out(
    kind: str,
    layers: Sequence[Layer],
    turned: Sequence[bool],
    x: Symbol,
    initial: Sequence[Symbol],
    lengths: Symbol | None,
) -> States:
    """A layer as operators of every step.

    A sequence that has ended keeps its state, and gives zeros.
    """
    if x.shape[0] > LONGEST:
        raise ModelError(
            f"a recurrent layer over {x.shape[0]} steps that torch has no operator for is written "
            f"out, which is done for at most {LONGEST}"
        )
    outputs = []
    finals = []
    for index, (layer, reverse) in enumerate(zip(layers, turned, strict=True)):
        states = tuple(state.select(0, index) for state in initial)
        made: list[Symbol] = []
        for t in reversed(range(x.shape[0])) if reverse else range(x.shape[0]):
            new = getattr(layer, kind)(x.select(0, t), states)
            # Padding after a sequence must not change its last state, whichever way it is read.
            alive = None if lengths is None else (lengths > t).unsqueeze(1)
            made.append(new[0] if alive is None else where(alive, new[0], 0))
            states = tuple(
                fresh if alive is None else where(alive, fresh, old)
                for fresh, old in zip(new, states, strict=True)
            )
        outputs.append(stack(made[::-1] if reverse else made, 0))
        finals.append(states)
    return (stack(outputs, 1), *(stack(parts, 0) for parts in zip(*finals, strict=True)))


FUNCTIONS: Mapping[str, Callable[..., States]] = {
    "RNN": partial(_layer, "rnn"),
    "GRU": partial(_layer, "gru"),
    "LSTM": partial(_layer, "lstm"),
}
