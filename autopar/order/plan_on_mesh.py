"""A plan's decisions on the mesh of one stage.

A plan has one layout for each parameter and output, and one list of chains. What was chosen for the
mesh of another stage may not exist on this one, and is replaced here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir import Operator
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.layout import Layout, R, is_valid, replicated
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Decision
from autopar.sharding.redistribution import cheapest_chain, without_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A plan's decisions: layouts of parameters and outputs, and chains.

    `decide` gives the decision for an operator on a mesh. `matrices`: as of `Assignment`.
    """

    decide: Callable[[str, Mesh], Decision]
    storage: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    chains: Mapping[str, tuple[tuple[Layout, ...], ...]]
    host: frozenset[str]
    matrices: frozenset[str] = frozenset()


def named_decision(operator: str, offer: Offer, strategy: Sequence[str], mesh: Mesh) -> Decision:
    """The decision for an operator by the names of its options, one for each axis.

    Raises `PlanError` if the operator has no such options, or if they do not divide its sizes.
    """
    known = {option.name: option for option in offer.options}
    options = tuple(known[name] for name in strategy if name in known)
    if len(options) != len(mesh.axes) or len(strategy) != len(mesh.axes):
        raise PlanError(
            f"the plan's strategy of {operator!r} is {' '.join(strategy)}; valid on each axis are "
            f"{', '.join(known)}"
        )
    decision = Decision.chosen(options, offer, mesh.shape)
    if decision is None:
        raise PlanError(
            f"the plan's strategy of {operator!r} ({' '.join(strategy)}) does not divide its sizes"
        )
    return decision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOnMesh:
    """A plan's decisions for the operators of a stage with this mesh."""

    analysis: Analysis
    decided: Decided
    mesh: Mesh

    @property
    def whole(self) -> Layout:
        """The layout of whole values."""
        return replicated(len(self.mesh.axes))

    def decisions(self, operators: Sequence[Operator]) -> dict[str, Decision]:
        """The decisions for these operators, and for all cold ones, which work on whole values."""
        decisions = {
            op.name: Decision.cold(op, len(self.mesh.axes))
            for op in self.analysis.graph.operators
            if op.name in self.analysis.cold
        }
        return decisions | {
            op.name: self.decided.decide(op.name, self.mesh)
            for op in operators
            if op.name not in decisions
        }

    def fitting(self, name: str, layout: Layout) -> Layout:
        """The layout if it fits this mesh; one for another stage's mesh becomes replicated."""
        return layout if self._fits(name, layout) else (R,) * len(self.mesh.axes)

    def _fits(self, name: str, layout: Layout) -> bool:
        return len(layout) == len(self.mesh.axes) and is_valid(
            layout, self.analysis.graph.tensors[name].shape, self.mesh.shape
        )

    def chains(
        self,
        operators: Sequence[Operator],
        decisions: Mapping[str, Decision],
        stored: Mapping[str, Layout],
        outputs: Mapping[str, Layout],
    ) -> dict[str, tuple[tuple[Layout, ...], ...]]:
        """The chains that these operators and outputs need.

        They start from what is `stored` (parameters, and values that arrive) and from what the
        operators make. They are the plan's where these start from an available layout, and new ones
        of the fewest bytes for the rest.
        """
        available = dict.fromkeys(self.analysis.graph.tensors, self.whole) | dict(stored)
        for op in operators:
            available.update(zip(op.outputs, decisions[op.name].outputs, strict=True))
        needed = [
            pair
            for op in operators
            for pair in zip(op.inputs, decisions[op.name].inputs, strict=True)
        ]
        return self._between(available, [*needed, *outputs.items()])

    def _between(
        self, available: Mapping[str, Layout], needed: Sequence[tuple[str, Layout]]
    ) -> dict[str, tuple[tuple[Layout, ...], ...]]:
        """The chains from the available layouts to the needed ones."""
        chains: dict[str, list[tuple[Layout, ...]]] = {}
        reached: dict[str, set[Layout]] = {}
        for name, layout in dict.fromkeys(needed):
            if name not in reached:
                reached[name] = {available[name]}
                for chain in self.decided.chains.get(name, ()):
                    # One for the mesh of another stage may pass layouts that do not exist on this
                    # one.
                    fits = all(self._fits(name, step) for step in chain)
                    if fits and chain[0] in reached[name] and chain[-1] not in reached[name]:
                        chains.setdefault(name, []).append(chain)
                        reached[name].add(chain[-1])
            if layout not in reached[name]:
                chains.setdefault(name, []).append(self._shortest(name, available[name], layout))
                reached[name].add(layout)
        return {name: tuple(several) for name, several in chains.items()}

    def _shortest(self, name: str, source: Layout, target: Layout) -> tuple[Layout, ...]:
        tensor = self.analysis.graph.tensors[name]
        gradient = name in self.analysis.gradients
        itemsize = tensor.own_bytes // max(tensor.size, 1)
        end = target if gradient else without_gradient(target)
        return cheapest_chain(
            source,
            end,
            tensor.shape,
            itemsize,
            self.mesh.shape,
            # There are no prices here: bytes decide, and the 1 prefers fewer collectives.
            lambda kind, axes, nbytes: 1.0 + nbytes,
            gradient=gradient,
        )
