"""Decisions from a solution of the cost graph: strategies, storage, and the chains between them."""

from __future__ import annotations

from functools import cache, partial

from autopar.ir import DTYPE_BYTES, Operator, Role, Tensor
from autopar.sharding.layout import Layout, Placement, R
from autopar.sharding.program import Assignment, Decision
from autopar.sharding.redistribution import (
    ONCE,
    Often,
    StepPrice,
    chain_price,
    cheapest_chain,
    local_bytes,
    parameter_chain,
)
from autopar.sharding.strategies import Strategies

from .tables import Tables


def decode(tables: Tables, choices: tuple[int, ...]) -> Assignment:
    """The decisions of a solution, with the cheapest chain for every redistribution."""
    return _Decoder(tables, choices).assignment()


class _Decoder:
    """Collects decisions, storage, outputs, and the chains between them."""

    def __init__(self, tables: Tables, choices: tuple[int, ...]) -> None:
        self.tables = tables
        self.chosen = {
            (v.what, name): int(v.rows[c])
            for v, c in zip(tables.variables, choices, strict=True)
            for name in v.members or (v.name,)
        }
        # A choice with bytes in host memory is one whose state is there.
        pairs = zip(tables.variables, choices, strict=True)
        self.host = frozenset(
            v.name for v, choice in pairs if v.host is not None and v.host[choice] > 0
        )
        self.chains: dict[str, dict[Layout, tuple[Layout, ...]]] = {}
        self.known = tables.chains
        self.decided: dict[tuple[Strategies, int], Decision] = {}
        self.seconds = cache(tables.prices.seconds)

    def assignment(self) -> Assignment:
        tables = self.tables
        analysis = self.tables.analysis
        whole = (R,) * len(tables.prices.mesh.axes)
        decisions: dict[str, Decision] = {}
        home: dict[str, Layout] = {}
        storage: dict[str, Layout] = {}
        # Inputs and constants come whole to every device.
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
            outputs[name] = (
                self._layout("output", name) if ("output", name) in self.chosen else home[name]
            )
            self._connect(name, home[name], outputs[name])
        chains = {name: tuple(by_target.values()) for name, by_target in self.chains.items()}
        return Assignment(
            mesh=tables.prices.mesh,
            decisions=decisions,
            storage=storage,
            outputs=outputs,
            chains=chains,
            gradients=analysis.gradients,
            host=self.host,
            matrices=analysis.updated_whole(tables.optimizer),
        )

    def _layout(self, what: str, name: str) -> Layout:
        return self.tables.spaces[name].layout(self.chosen[what, name])

    def _decision(self, op: Operator, axes: int) -> Decision:
        # Operators of the preamble (masks, positions) run whole on every device.
        if op.name in self.tables.analysis.cold:
            return Decision.cold(op, axes)
        strategies = self.tables.strategies[op.name]
        index = self.chosen["operator", op.name]
        # Equal operators with equal choices share a decision, and all that is made of it.
        if (strategies, index) not in self.decided:
            inputs, outputs = strategies.layouts(index)
            options = tuple(strategies.options[o] for o in strategies.choices[index])
            self.decided[strategies, index] = Decision(
                options=options, rule=strategies.rule, inputs=inputs, outputs=outputs
            )
        return self.decided[strategies, index]

    def _connect(self, name: str, home: Layout, target: Layout) -> None:
        """Record a tensor's chains from its home to `target`, through its fan-out if it has one."""
        source = home
        # All readers continue from there, so the tensor is brought there once.
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
        stored = (
            gradient and tensor.role is Role.PARAMETER and source == self._layout("parameter", name)
        )
        # A chain is a shortest path, so equal redistributions share it, those of later solutions
        # too.
        often = self._often(tensor)
        size = tensor.shape, tensor.bytes, tensor.role
        key = (source, target, *size, gradient, kinds, stored, often)
        if key not in self.known:
            self.known[key] = self._chain(
                tensor, source, target, kinds, gradient=gradient, stored=stored
            )
        self.chains.setdefault(name, {})[target] = self.known[key]

    def _often(self, tensor: Tensor) -> Often:
        """How often a tensor travels, and its gradient: parameters in a step, values in a pass."""
        return self.tables.often if tensor.role is Role.PARAMETER else ONCE

    def _chain(
        self,
        tensor: Tensor,
        source: Layout,
        target: Layout,
        kinds: tuple[Placement, ...],
        *,
        gradient: bool,
        stored: bool,
    ) -> tuple[Layout, ...]:
        prices = self.tables.prices
        itemsize = DTYPE_BYTES[tensor.dtype]
        mesh = prices.mesh.shape
        often = self._often(tensor)

        seconds: StepPrice = self.seconds
        if tensor.role is Role.PARAMETER:
            # It takes its share of a unit, which is made of the larger of both ends.
            ends = (local_bytes(layout, tensor.bytes, mesh) for layout in (source, target))
            seconds = partial(prices.share_of_unit, max(ends))

        def find(start: Layout, end: Layout) -> tuple[tuple[Layout, ...], float]:
            chain = cheapest_chain(
                start,
                end,
                tensor.shape,
                itemsize,
                mesh,
                seconds,
                gradient=gradient,
                kinds=kinds,
                often=often,
            )
            return chain, chain_price(
                chain, tensor.bytes, mesh, seconds, gradient=gradient, often=often
            )

        if stored:
            return parameter_chain(source, target, find, seconds, tensor.bytes, mesh)
        return find(source, target)[0]
