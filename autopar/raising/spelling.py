"""Reads what the operators of a graph say, however an exporter has spelled it."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir import DTYPE_BYTES, Graph, Operator, Role

_CASTS = frozenset({"to", "_to_copy", "alias", "contiguous", "clone"})
SHAPED = ("view", "reshape", "flatten", "_unsafe_view", "contiguous", "clone")
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "reciprocal": -1.0}


def word(operator: Operator) -> str:
    """The name of an operator without its namespace and overload; empty if its result is rounded.

    >>> word(Operator(name="a", kind="aten.mul.Tensor", inputs=(), outputs=()))
    'mul'
    """
    return "" if operator.attributes.get("rounding_mode") else operator.kind.split(".")[1]


def beside(operator: Operator, name: str) -> str:
    """A name in the module of an operator.

    >>> beside(Operator(name="norm/mul", kind="aten.mul.Tensor", inputs=(), outputs=()), "rms_norm")
    'norm/rms_norm'
    """
    return f"{operator.name.rpartition('/')[0] or operator.name}/{name}"


class Spelling:
    """The makers and readers of a graph's tensors.

    `leaving`: tensors that leave the graph. `learned`: those that may have a gradient, as they rest
    on parameters or on inputs of floats.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors = graph.tensors
        self.makers = {name: op for op in graph.operators for name in op.outputs}
        self.readers: dict[str, list[Operator]] = {}
        for operator in graph.operators:
            for name in dict.fromkeys(operator.inputs):
                self.readers.setdefault(name, []).append(operator)
        self.leaving = {*graph.outputs, *graph.updates.values()}
        if graph.loss:
            self.leaving.add(graph.loss)
        roots = (t for t in graph.tensors.values() if t.role in (Role.PARAMETER, Role.INPUT))
        self.learned = {tensor.name for tensor in roots if tensor.is_float}
        for operator in graph.operators:
            if not self.learned.isdisjoint(operator.inputs):
                self.learned.update(n for n in operator.outputs if self.tensors[n].is_float)

    def maker(self, name: str, *words: str) -> Operator | None:
        """The operator that makes a tensor, if it is one of these."""
        operator = self.makers.get(name)
        return operator if operator is not None and word(operator) in words else None

    def reader(self, name: str) -> Operator | None:
        """The one operator that reads a tensor, if nothing else does."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.leaving else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """The element type of a tensor."""
        return self.tensors[name].dtype

    def width(self, name: str) -> int:
        """The bytes of an element of a tensor."""
        return DTYPE_BYTES[self.tensors[name].dtype]

    def casts(self, operator: Operator) -> bool:
        """Whether an operator gives floats in another type (not one of a byte), or as they are."""
        ends = (*operator.inputs, *operator.outputs)
        wide = all(self.tensors[name].is_float and self.width(name) > 1 for name in ends)
        idle = word(operator) == "dropout" and operator.attributes.get("p") == 0
        return wide and (idle or word(operator) in _CASTS)

    def uncast(self, name: str) -> str:
        """The tensor of which this one is a cast."""
        while (maker := self.makers.get(name)) is not None and self.casts(maker):
            name = maker.inputs[0]
        return name

    def number(self, operator: Operator, formal: str, place: int) -> float | None:
        """The number that is the argument `formal`, or the constant of one element at a place."""
        given = operator.attributes.get(formal)
        if isinstance(given, int | float):
            return float(given)
        if place >= len(operator.inputs):
            return None
        array = self.graph.constants.get(self.uncast(operator.inputs[place]))
        return float(array.reshape(())) if array is not None and array.size == 1 else None

    def power(self, name: str) -> tuple[str, float]:
        """The tensor and the exponent of which a value is the power; casts do not count."""
        name = self.uncast(name)
        maker = self.makers.get(name)
        if maker is None or not maker.inputs:
            return name, 1.0
        said = word(maker)
        exponent = _ROOTS.get(said)
        if said == "pow":
            exponent = self.number(maker, "exponent", 1)
        if said == "mul" and self.number(maker, "other", 1) == 1.0:
            exponent = 1.0
        if said == "mul" and len(maker.inputs) == 2 and len({*map(self.uncast, maker.inputs)}) == 1:
            exponent = 2.0
        if exponent is None:
            return name, 1.0
        base, inner = self.power(maker.inputs[0])
        return base, inner * exponent

    def multiple(self, name: str) -> tuple[str, float]:
        """The tensor and the number of which a value is the product; casts do not count."""
        scale = 1.0
        while (maker := self.maker(self.uncast(name), "mul", "div")) is not None:
            number = self.number(maker, "other", 1)
            if not number:
                break
            scale *= number if word(maker) == "mul" else 1 / number
            name = maker.inputs[0]
        return self.uncast(name), scale

    def capped(self, name: str) -> tuple[str, float, float]:
        """The tensor x and the numbers of which a value is cap tanh(scale x / cap).

        Where there is no hyperbolic tangent it is scale x, and the cap is 0. Casts do not count.
        """
        name, scale = self.multiple(name)
        tanh = self.maker(name, "tanh")
        if tanh is None or scale <= 0:
            return name, scale, 0.0
        name, inner = self.multiple(tanh.inputs[0])
        return name, scale * inner, scale

    def unshaped(self, name: str) -> str:
        """The tensor of which this one is a cast, or has the rows in another shape."""
        while (maker := self.makers.get(name)) is not None:
            shaped = (
                word(maker) in SHAPED and self.shape(maker.inputs[0])[-1:] == self.shape(name)[-1:]
            )
            if not shaped and not self.casts(maker):
                break
            name = maker.inputs[0]
        return name

    def leads_to(self, name: str, last: str) -> bool:
        """Whether a tensor is read only on its way to another one."""
        while name != last:
            reader = self.reader(name)
            if reader is None:
                return False
            name = reader.outputs[0]
        return True

    def pairs(self, operator: Operator) -> Iterator[tuple[str, str]]:
        """The two tensors of a sum or a product, in both orders."""
        if len(operator.inputs) == 2:
            yield operator.inputs[0], operator.inputs[1]
            yield operator.inputs[1], operator.inputs[0]
