"""From a solution of the cost graph back to decisions: strategies, storage, and the chains that execute them."""

from __future__ import annotations

from functools import cache

from ..ir import DTYPE_BYTES, Operator, Role, Tensor
from ..sharding.layout import Layout, Placement, R
from ..sharding.program import Assignment, Decision
from ..sharding.redistribution import chain_price, cheapest_chain, parameter_chain
from .tables import Tables


def decode(tables: Tables, choices: tuple[int, ...]) -> Assignment:
    """The decisions of a solution, with the cheapest chain for every redistribution."""
    return _Decoder(tables, choices).assignment()


class _Decoder:
    """Collects decisions, storage, outputs, and the chains between them."""

    def __init__(self, tables: Tables, choices: tuple[int, ...]) -> None:
        self.tables = tables
        self.chosen = {(v.what, v.name): int(v.rows[c]) for v, c in zip(tables.variables, choices, strict=True)}
        pairs = zip(tables.variables, choices, strict=True)
        self.host = frozenset(v.name for v, choice in pairs if v.host is not None and v.host[choice] > 0)
        self.chains: dict[str, dict[Layout, tuple[Layout, ...]]] = {}
        self.known = tables.chains
        self.decided: dict[tuple[int, int], Decision] = {}
        self.seconds = cache(tables.prices.seconds)

    def assignment(self) -> Assignment:
        tables, analysis = self.tables, self.tables.analysis
        whole = (R,) * len(tables.prices.mesh.axes)
        decisions: dict[str, Decision] = {}
        home: dict[str, Layout] = {}
        storage: dict[str, Layout] = {}
        for tensor in analysis.graph.tensors.values():
            if tensor.role is not Role.ACTIVATION:
                home[tensor.name] = whole
        for what, name in self.chosen:
            if what == "parameter":
                storage[name] = home[name] = self._layout(what, name)
        storage.update({t.name: whole for t in analysis.graph.parameters if t.name not in storage})
        for op in analysis.graph.operators:
            decisions[op.name] = decision = self._decision(op, len(whole))
            for name, layout in zip(op.inputs, decision.inputs, strict=True):
                self._connect(name, home[name], layout)
            home.update(zip(op.outputs, decision.outputs, strict=True))
        outputs = {}
        for name in analysis.outputs:
            outputs[name] = self._layout("output", name) if ("output", name) in self.chosen else home[name]
            self._connect(name, home[name], outputs[name])
        chains = {name: tuple(found.values()) for name, found in self.chains.items()}
        return Assignment(
            mesh=tables.prices.mesh, decisions=decisions, storage=storage, outputs=outputs, chains=chains,
            gradients=analysis.gradients, host=self.host,
        )  # fmt: skip

    def _layout(self, what: str, name: str) -> Layout:
        return self.tables.spaces[name].layout(self.chosen[what, name])

    def _decision(self, op: Operator, axes: int) -> Decision:
        if op.name in self.tables.analysis.cold:
            whole = (R,) * axes
            return Decision(options=(), rule=None, inputs=(whole,) * len(op.inputs), outputs=(whole,) * len(op.outputs))
        strategies, index = self.tables.strategies[op.name], self.chosen["operator", op.name]
        if (id(strategies), index) not in self.decided:
            inputs, outputs = strategies.layouts(index)
            options = tuple(strategies.options[o] for o in strategies.choices[index])
            self.decided[id(strategies), index] = Decision(options=options, rule=strategies.rule, inputs=inputs, outputs=outputs)
        return self.decided[id(strategies), index]

    def _connect(self, name: str, home: Layout, target: Layout) -> None:
        """Record the chains of a tensor from its home to `target`, through its fan-out layout if it has one."""
        source = home
        if ("fan-out", name) in self.chosen:
            source = self._layout("fan-out", name)
            self._record(name, home, source)
        if target != home:
            self._record(name, source, target)

    def _record(self, name: str, source: Layout, target: Layout) -> None:
        if source == target or target in self.chains.get(name, {}):
            return
        tensor = self.tables.analysis.graph.tensors[name]
        gradient = name in self.tables.analysis.gradients
        kinds = self.tables.spaces[name].kinds if name in self.tables.spaces else ()
        stored = gradient and tensor.role is Role.PARAMETER and source == self._layout("parameter", name)
        key = (source, target, tensor.shape, tensor.dtype, tensor.role, gradient, kinds, stored)
        if key not in self.known:
            self.known[key] = self._chain(tensor, source, target, kinds, gradient=gradient, stored=stored)
        self.chains.setdefault(name, {})[target] = self.known[key]

    def _chain(
        self, tensor: Tensor, source: Layout, target: Layout, kinds: tuple[Placement, ...], *, gradient: bool, stored: bool
    ) -> tuple[Layout, ...]:
        prices, itemsize = self.tables.prices, DTYPE_BYTES[tensor.dtype]
        mesh = prices.mesh.shape

        seconds = prices.unit_share if tensor.role is Role.PARAMETER else self.seconds

        def find(start: Layout, end: Layout) -> tuple[tuple[Layout, ...], float]:
            chain = cheapest_chain(start, end, tensor.shape, itemsize, mesh, seconds, gradient=gradient, kinds=kinds)
            return chain, chain_price(chain, tensor.bytes, mesh, seconds, gradient=gradient)

        if stored:
            return parameter_chain(source, target, find, prices.unit_share, tensor.bytes, mesh)
        return find(source, target)[0]
