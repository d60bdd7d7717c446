"""Recurrent layers: RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.errors import ModelError

from .elementwise import named, softsign
from .symbols import Symbol, cat, stack, where

LONGEST = 1024
"""Steps of a layer that torch's own does not compute, which are written out one by one."""
_ACTIVATIONS: Mapping[str, Callable[[Symbol], Symbol]] = {
    **{name: named(name) for name in ("tanh", "sigmoid", "relu", "softplus")},
    "softsign": softsign,
}
Step = Callable[[Symbol, tuple[Symbol, ...]], tuple[Symbol, ...]]


class Layer:
    """A recurrent layer: its weights by direction, and how its sequences are read.

    `X` [steps, batch, inputs], or with `layout` 1 the batch first; `W`, `R` and `B` hold a
    direction after another.
    """

    default: tuple[str, ...] = ()
    """The activations, as ONNX has them where a file names none."""

    def __init__(
        self,
        *,
        X: Symbol,
        W: Symbol,
        R: Symbol,
        B: Symbol | None = None,
        sequence_lens: Symbol | None = None,
        initial_h: Symbol | None = None,
        initial_c: Symbol | None = None,
        P: Symbol | None = None,
        activations: tuple[str, ...] | None = None,
        activation_alpha: object = None,
        activation_beta: object = None,
        clip: float | None = None,
        direction: str = "forward",
        hidden_size: int | None = None,
        layout: int = 0,
        linear_before_reset: int = 0,
        input_forget: int = 0,
    ) -> None:
        # The steps run over the first dim.
        self.x = X.transpose(0, 1) if layout else X
        self.W, self.R, self.B, self.P = W, R, B, P
        self.hidden = R.shape[-1]
        self.lengths = sequence_lens
        self.clip = clip
        self.layout = layout
        self.reset_late = linear_before_reset
        self.input_forget = input_forget
        self.reversals = {"bidirectional": (False, True), "reverse": (True,)}.get(
            direction, (False,)
        )
        self.names = self._names(activations)
        states = (initial_h, initial_c)[: 2 if type(self) is LongShortTerm else 1]
        self.initial = [self._state(state, layout) for state in states]

    def _names(self, given: Sequence[str] | None) -> list[str]:
        """The activations of all directions in a row; one list of names serves both."""
        names = [name.lower() for name in given or self.default]
        names = names * 2 if len(names) == len(self.default) else names
        unknown = [name for name in names if name not in _ACTIVATIONS]
        if unknown:
            raise ModelError(
                f"unknown activation {unknown[0]!r}: valid are {', '.join(sorted(_ACTIVATIONS))}"
            )
        return names

    def _state(self, given: Symbol | None, layout: int) -> Symbol:
        if given is not None:
            return given.transpose(0, 1) if layout else given
        zeros = self.x.constant(np.zeros((1, 1, 1), np.float32)).to(self.x.dtype)
        return zeros.expand(len(self.reversals), self.x.shape[1], self.hidden)

    def functions(self, index: int) -> list[Callable[[Symbol], Symbol]]:
        """The activations of one direction."""
        count = len(self.default)
        return [_ACTIVATIONS[name] for name in self.names[index * count : (index + 1) * count]]

    def clipped(self, x: Symbol) -> Symbol:
        """Values within the layer's bounds."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def bias(self, index: int, half: int) -> Symbol | None:
        """The bias of inputs (0) or of states (1) in one direction."""
        return None if self.B is None else self.B.select(0, index).chunk(2, 0)[half]

    def step(self, index: int) -> Step:
        """The function of one step of a direction: its inputs and states to new states."""
        raise NotImplementedError

    def run(self) -> tuple[Symbol, ...]:
        """The outputs and the last states, in ONNX's layouts."""
        made = self.fused() or self.written_out()
        if self.layout:
            y, *states = made
            return (y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states))
        return made

    # --- torch's own layer ---

    name = ""
    order: tuple[int, ...] = ()
    """Torch's operator, and the places of ONNX's gates in the order that it wants."""

    def is_fused(self) -> bool:
        """Whether torch's layer computes this one."""
        common = [name.lower() for name in self.default] * 2
        return (
            self.clip is None
            and self.lengths is None
            and self.reversals != (True,)
            and self.names == common
            and self.P is None
            and not self.input_forget
        )

    def _ordered(self, weight: Symbol) -> Symbol:
        gates = weight.chunk(len(self.order), 0)
        return cat([gates[place] for place in self.order], 0) if len(gates) > 1 else weight

    def fused(self) -> tuple[Symbol, ...] | None:
        """The layer as torch's operator, where that computes it."""
        if not self.is_fused():
            return None
        parameters: list[Symbol] = []
        for index in range(len(self.reversals)):
            weights = [self.W.select(0, index), self.R.select(0, index)]
            halves = [self.bias(index, half) for half in (0, 1)]
            weights += [half for half in halves if half is not None]
            parameters += [self._ordered(weight) for weight in weights]
        steps, batch = self.x.shape[:2]
        count = len(self.reversals)
        states = tuple(self.initial)
        y, *last = self.x.several(
            f"{self.name}.input",
            [((steps, batch, count * self.hidden), self.x.dtype)]
            + [(state.shape, self.x.dtype) for state in states],
            input=self.x,
            hx=states if len(states) > 1 else states[0],
            params=tuple(parameters),
            has_biases=self.B is not None,
            num_layers=1,
            dropout=0.0,
            train=False,
            bidirectional=count > 1,
            batch_first=False,
        )
        y = y.reshape(steps, batch, count, self.hidden).transpose(1, 2)
        return (y, *last)

    # --- step by step ---

    def written_out(self) -> tuple[Symbol, ...]:
        """The layer as operators of every step."""
        if self.x.shape[0] > LONGEST:
            raise ModelError(
                f"a recurrent layer over {self.x.shape[0]} steps that torch has no operator for "
                f"is written out, which is done for at most {LONGEST}"
            )
        outputs = []
        finals = []
        for index, reverse in enumerate(self.reversals):
            start = tuple(state.select(0, index) for state in self.initial)
            y, last = self._scan(self.step(index), start, reverse)
            outputs.append(y)
            finals.append(last)
        states = [stack(parts, 0) for parts in zip(*finals, strict=True)]
        return (stack(outputs, 1), *states)

    def _scan(
        self, step: Step, states: tuple[Symbol, ...], reverse: bool
    ) -> tuple[Symbol, tuple[Symbol, ...]]:
        """Step over the first dim; a sequence that has ended keeps its state and gives zeros."""
        outputs: list[Symbol] = []
        order = range(self.x.shape[0])
        for t in reversed(order) if reverse else order:
            new = step(self.x.select(0, t), states)
            if self.lengths is not None:
                # Padding after a sequence must not change its last state, whichever way it is read.
                alive = (self.lengths > t).unsqueeze(1)
                states = tuple(
                    where(alive, fresh, old) for fresh, old in zip(new, states, strict=True)
                )
                outputs.append(where(alive, new[0], 0))
            else:
                states = new
                outputs.append(new[0])
        return stack(outputs[::-1] if reverse else outputs, 0), states


def _product(x: Symbol, weight: Symbol, bias: Symbol | None) -> Symbol:
    shape = (x.shape[0], weight.shape[0])
    return x.new("linear.default", shape, input=x, weight=weight, bias=bias)


class Plain(Layer):
    """A plain recurrent layer."""

    default = ("Tanh",)
    order = (0,)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Torch has an operator for two activations."""
        return f"rnn_{self.names[0]}"

    def is_fused(self) -> bool:
        """Whether torch's layer computes this one."""
        usual = self.names[0] in ("tanh", "relu") and len(set(self.names)) == 1
        return usual and self.clip is None and self.lengths is None and self.reversals != (True,)

    def step(self, index: int) -> Step:
        """h = f(W x + R h)."""
        (f,) = self.functions(index)
        W, R = self.W.select(0, index), self.R.select(0, index)
        biases = self.bias(index, 0), self.bias(index, 1)

        def step(x: Symbol, state: tuple[Symbol, ...]) -> tuple[Symbol, ...]:
            total = _product(x, W, biases[0]) + _product(state[0], R, biases[1])
            return (f(self.clipped(total)),)

        return step


class Gated(Layer):
    """A gated recurrent layer; gates in the order update, reset, hidden."""

    default = ("Sigmoid", "Tanh")
    name = "gru"
    order = (1, 0, 2)

    def is_fused(self) -> bool:
        """Torch multiplies what the state gives by the reset gate, not the state."""
        return bool(self.reset_late) and super().is_fused()

    def step(self, index: int) -> Step:
        """h = (1 - z) g(W x + R (r h)) + z h."""
        f, g = self.functions(index)
        W = self.W.select(0, index)
        R = self.R.select(0, index).chunk(3, 0)
        of_inputs, of_states = self.bias(index, 0), self.bias(index, 1)
        b = (None,) * 3 if of_states is None else of_states.chunk(3, 0)

        def step(x: Symbol, state: tuple[Symbol, ...]) -> tuple[Symbol, ...]:
            (h,) = state
            xz, xr, xh = _product(x, W, of_inputs).chunk(3, -1)
            update = f(self.clipped(xz + _product(h, R[0], b[0])))
            reset = f(self.clipped(xr + _product(h, R[1], b[1])))
            # The two orders differ in the last bits and in what the reset gate multiplies.
            if self.reset_late:
                inner = reset * _product(h, R[2], b[2])
            else:
                inner = _product(reset * h, R[2], b[2])
            return ((1 - update) * g(self.clipped(xh + inner)) + update * h,)

        return step


class LongShortTerm(Layer):
    """A long short-term memory layer with peepholes `P`.

    The gates stand in the order input, output, forget, cell.
    """

    default = ("Sigmoid", "Tanh", "Tanh")
    name = "lstm"
    order = (0, 2, 3, 1)

    def step(self, index: int) -> Step:
        """c = f c + i g(W x + R h), h = o tanh(c)."""
        f, g, h = self.functions(index)
        W, R = self.W.select(0, index), self.R.select(0, index)
        biases = self.bias(index, 0), self.bias(index, 1)
        peeps = None if self.P is None else self.P.select(0, index).chunk(3, 0)

        def step(x: Symbol, state: tuple[Symbol, ...]) -> tuple[Symbol, ...]:
            previous, memory = state
            gates = _product(x, W, biases[0]) + _product(previous, R, biases[1])
            i, o, forget, c = gates.chunk(4, -1)
            if peeps is not None:
                i = i + peeps[0] * memory
                forget = forget + peeps[2] * memory
            i = f(self.clipped(i))
            forget = 1 - i if self.input_forget else f(self.clipped(forget))
            memory = forget * memory + i * g(self.clipped(c))
            o = o if peeps is None else o + peeps[1] * memory
            return f(self.clipped(o)) * h(memory), memory

        return step


def _of(kind: type[Layer]) -> Callable[..., tuple[Symbol, ...]]:
    return lambda **arguments: kind(**arguments).run()


FUNCTIONS: Mapping[str, Callable[..., tuple[Symbol, ...]]] = {
    "RNN": _of(Plain),
    "GRU": _of(Gated),
    "LSTM": _of(LongShortTerm),
}
