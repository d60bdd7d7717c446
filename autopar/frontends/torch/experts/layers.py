"""Reads a layer of experts, written as grouped products with operators between, as one operator.

    rows → product with `up` → activation → product with `down`

becomes `rows → autopar.experts`, so that rows travel to their experts once. If the layer itself
sorts tokens by expert and restores their order, the sorting is left out too: the operator then
takes the tokens [n, h] and the expert chosen for each of their rows [n k].

An expert's computation is a small program, the attribute `network`: calls (kind, arguments,
results), each result as (width, dtype, dims in the notation of rules). Its values are the texts
`%rows`, `%ends`, `%experts` (of every row), `%w0` (an operand), `%0` (a result).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir import Graph, Operator, Ref, Value, needed_operators
from autopar.ir.stored_products import EXPERTS

from .routing import Finder, Product, Routing, find_routing

KIND = EXPERTS
_PARTS = (1, 2, 3, 4)
"""Numbers of equal parts in which the columns of a product may be read.

One, or a gate and the gated columns.
"""


def _kinds(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


ELEMENTWISE = _kinds(
    """
    silu.default gelu.default relu.default relu6.default sigmoid.default tanh.default
    mish.default selu.default softplus.default leaky_relu.default elu.default hardtanh.default
    hardswish.default hardsigmoid.default log_sigmoid.default exp.default neg.default
    square.default abs.default sqrt.default reciprocal.default clamp.default clamp_min.default
    clamp_max.default pow.Tensor_Scalar erf.default add.Tensor add.Scalar sub.Tensor sub.Scalar
    mul.Tensor mul.Scalar div.Tensor div.Scalar minimum.default maximum.default to.dtype
    _to_copy.default clone.default contiguous.default alias.default
    """
)
PARTED = _kinds("chunk.default split.Tensor split_with_sizes.default split.sizes")
SLICED = _kinds("slice.Tensor")


def join_experts(graph: Graph) -> Graph:
    """The graph with every layer of experts as one operator; other operators stay unchanged."""
    finder = Finder(graph)
    sorted_up_to = dict.fromkeys(
        product.ends for op in graph.operators if (product := finder.product(op)) is not None
    )
    for ends in sorted_up_to:
        layer = _Layer(Finder(graph), ends)
        if layer.reads():
            graph = layer.joined()
    return graph


class _Layer:
    """The products over rows with the same `ends`, and the operators between them."""

    def __init__(self, finder: Finder, ends: str) -> None:
        self.finder = finder
        self.ends = ends
        self.graph = finder.graph
        self.tensors = finder.graph.tensors
        products = ((op, finder.product(op)) for op in self.graph.operators)
        own = [
            (op, product)
            for op, product in products
            if product is not None and product.ends == ends
        ]
        self.products: dict[str, Product] = {op.name: product for op, product in own}
        self.last = own[-1][0]
        # The maker of the results: the last product, or its sum with the bias.
        self.final = self.last
        self.own: dict[str, Operator] = {}  # by name, all that the layer consists of
        self.parts: dict[
            str, int
        ] = {}  # of the values between: in how many parts their columns lie
        self.source = ""
        self.operands: list[str] = []

    def reads(self) -> bool:
        """Whether the products form a layer.

        All but the last take the same rows, and only the layer reads between.
        """
        if not self._collect():
            return False
        first = [product for name, product in self.products.items() if name != self.last.name]
        sources = {self.finder.uncast(product.rows) for product in first}
        if len(sources) != 1 or not self.own.keys() >= self.products.keys():
            return False
        self.source = sources.pop()
        inside = [name for op in self.own.values() for name in op.outputs if op is not self.final]
        read = all(
            user.name in self.own for name in inside for user in self.finder.users.get(name, ())
        )
        return (
            read
            and self.finder.wanted.isdisjoint(inside)
            and all(map(self._is_plain, self.own.values()))
        )

    def _collect(self) -> bool:
        """Go back from the last product to the first ones."""
        self.own[self.last.name] = self.last
        todo = [self.products[self.last.name].rows]
        while todo:
            op = self.finder.makers.get(todo.pop())
            if op is None:
                return False
            if op.name in self.own:
                continue
            self.own[op.name] = op
            if op.name not in self.products and not self._is_bias(op):
                if op.kind not in ELEMENTWISE | PARTED | SLICED or not self._by_row(op):
                    return False
                todo += op.inputs
        self._add_bias()
        return True

    def _is_bias(self, op: Operator) -> bool:
        return self.finder.bias(op, self.ends) is not None

    def _by_row(self, op: Operator) -> bool:
        """Whether an operator works on each row by itself."""
        rows = self.tensors[self.products[self.last.name].rows].shape[0]
        shapes = [self.tensors[name].shape for name in (*op.inputs, *op.outputs)]
        if not op.inputs or any(len(shape) != 2 or shape[0] != rows for shape in shapes):
            return False
        if op.kind in ELEMENTWISE:
            return len(set(shapes)) == 1
        return op.attributes.get("dim", 0) in (-1, 1)

    def _add_bias(self) -> None:
        """Take a bias that is added to the last product into the layer."""
        product = self.last.outputs[0]
        reader = self.finder.reader(product)
        if reader is None or reader.kind != "aten.add.Tensor" or len(reader.inputs) != 2:
            return
        bias = self.finder.makers.get(next((name for name in reader.inputs if name != product), ""))
        if bias is not None and self._is_bias(bias) and reader.attributes.get("alpha", 1) == 1:
            self.own |= {bias.name: bias, reader.name: reader}
            self.final = reader

    def _is_plain(self, op: Operator) -> bool:
        """Whether the arguments are tensors and numbers, or tell how to part the columns."""
        values = op.attributes.values()
        return (
            op.kind in PARTED
            or self._is_bias(op)
            or not any(isinstance(value, tuple) for value in values)
        )

    # --- what it computes ---

    def _divides(self) -> bool:
        """Whether the inner dim can be split.

        Its columns keep their order, or lie in equal separated parts.
        """
        for count in _PARTS:
            self.parts = {
                op.outputs[0]: count
                for name, op in self.own.items()
                if name in self.products and op is not self.last
            }
            if self._spread() and self.parts.get(self.products[self.last.name].rows) == 1:
                return True
        return False

    def _spread(self) -> bool:
        """Follow the parts of the columns from the first products to the last one."""
        for op in self._in_order():
            given = {self.parts[name] for name in op.inputs if name in self.parts}
            if not given or op.name in self.products:
                continue
            parts = max(given)
            pieces = len(op.outputs) if op.kind in PARTED else 1
            unequal = len({self.tensors[name].shape[1] for name in op.outputs}) > 1
            if len(given) > 1 or op.kind in SLICED or unequal or parts % pieces:
                return False
            self.parts.update(dict.fromkeys(op.outputs, parts // pieces))
        return True

    def _in_order(self) -> list[Operator]:
        return [op for op in self.graph.operators if op.name in self.own]

    def _network(self) -> tuple[Value, ...]:
        """The calls of the layer in order; fills the operands."""
        divides = self._divides()
        known = {self.ends: "%ends"} | dict.fromkeys((self.source, *self._first_rows()), "%rows")
        calls: list[Value] = []
        count = 0
        for op in self._in_order():
            if op.name not in self.products and self.finder.changes_nothing(op):
                known[op.outputs[0]] = known[op.inputs[0]]
                continue
            kind, arguments = self._call(op, known)
            made = []
            for name in op.outputs:
                known[name] = f"%{count}"
                count += 1
                made.append(
                    (
                        self.tensors[name].shape[1],
                        self.tensors[name].dtype,
                        self._dims(op, name, divides),
                    )
                )
            calls.append((kind, arguments, tuple(made)))
        return tuple(calls)

    def _first_rows(self) -> list[str]:
        return [product.rows for name, product in self.products.items() if name != self.last.name]

    def _call(self, op: Operator, known: dict[str, str]) -> tuple[str, tuple[Value, ...]]:
        bias = self.finder.bias(op, self.ends)
        if bias is not None:
            return "aten.index_select.default", (
                ("self", self._operand(bias, known)),
                ("dim", 0),
                ("index", "%experts"),
            )
        if op.kind in PARTED:
            return "aten.chunk.default", (
                ("self", known[op.inputs[0]]),
                ("chunks", len(op.outputs)),
                ("dim", -1),
            )
        if op.name in self.products:
            self._operand(self.products[op.name].weight, known)
        return op.kind, tuple(
            (name, known[op.inputs[value.index]] if isinstance(value, Ref) else value)
            for name, value in op.attributes.items()
        )

    def _operand(self, name: str, known: dict[str, str]) -> str:
        if name not in known:
            known[name] = f"%w{len(self.operands)}"
            self.operands.append(name)
        return known[name]

    def _dims(self, op: Operator, name: str, divides: bool) -> str:
        """The columns of a value, as a rule spells them.

        A bias has the columns of the value it is added to.
        """
        reader = self.finder.reader(name) if self._is_bias(op) else None
        if op in (self.last, self.final) or reader is self.final:
            return "!o"
        parts = self.parts.get(name if reader is None else reader.outputs[0])
        if not divides or parts is None:
            return f"!f{self.tensors[name].shape[1]}"
        return "f" if parts == 1 else f"(!c{parts}={parts} f)"

    # --- the graph with it ---

    def joined(self) -> Graph:
        """Put the layer in place of its operators, and drop those that nobody reads any more."""
        routing = find_routing(self.finder, self.source, self.ends, self.final.outputs[0])
        layer = self._operator(routing)
        made = self.final.outputs[0]
        renamed = {} if made in self.finder.wanted else {made: layer.outputs[0]}
        if routing is not None:
            # Readers of the rows get them in the order of the tokens from here on.
            renamed[routing.result] = routing.ordered
        operators: list[Operator] = []
        for op in self.graph.operators:
            if op is self.final:
                operators.append(replace(layer, outputs=(renamed.get(made, made),)))
            elif op.name not in self.own and (routing is None or routing.ordered not in op.outputs):
                op = op if routing is None else routing.changed.get(op.name, op)
                inputs, outputs = (
                    tuple(renamed.get(name, name) for name in names)
                    for names in (op.inputs, op.outputs)
                )
                operators.append(replace(op, inputs=inputs, outputs=outputs))
        output = replace(self.tensors[made], name=layer.outputs[0])
        needed = needed_operators(operators, self.finder.wanted)
        return replace(self.graph, tensors={**self.tensors, output.name: output}, operators=needed)

    def _operator(self, routing: Routing | None) -> Operator:
        path, slash, _ = self.last.name.rpartition("/")
        names = {op.name for op in self.graph.operators}
        candidates = (f"{path}{slash}experts{f'.{n}' if n else ''}" for n in range(len(names) + 1))
        name = next(candidate for candidate in candidates if candidate not in names)
        network = self._network()
        if routing is None:
            word = "ends"
            rows = self.source
            second = self.ends
        else:
            word = "chosen"
            rows = routing.tokens
            second = routing.chosen
        attributes: dict[str, Value] = {
            "rows": Ref(0),
            word: Ref(1),
            "operands": tuple(Ref(2 + i) for i in range(len(self.operands))),
            "network": network,
        }
        return Operator(
            name=name,
            kind=KIND,
            inputs=(rows, second, *self.operands),
            outputs=(f"{name}:0",),
            attributes=attributes,
        )
