"""Work of a plan on a tensor axis outside styled modules.

Styles slice, gather and split nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.plan import Plan
from autopar.plan_parts import OperatorPlan
from autopar.sharding.layout import Kind, Placement, parse_layout

from .axis_work import is_product, is_split, placements


def uncovered(plan: Plan, index: int, styled: Sequence[str], shares: bool) -> Iterable[str]:
    """Sentences on the work of operators without a style that the target would not do.

    Such work is a split parameter, or a value that is redistributed, anywhere up to the loss.
    `styled`: the operators with a style. `shares`: the target gives every rank its share of the
    batch, which for values is as good as the whole.
    """
    axis = _Axis(plan=plan, index=index, styled=frozenset(styled), shares=shares)
    # Behind the last product stands the loss, which the target computes in its own way.
    last = [
        name
        for name, operator in plan.operators.items()
        if is_product(operator) and any(tensor in plan.parameters for tensor, _ in operator.inputs)
    ][-1]
    for name, operator in plan.operators.items():
        if name not in axis.styled:
            yield from axis.odd(name, operator)
        if name == last:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """An axis of a plan, and the target's work there."""

    plan: Plan
    index: int
    styled: frozenset[str]
    shares: bool

    def odd(self, name: str, operator: OperatorPlan) -> Iterable[str]:
        """Sentences on an operator without a style: its parameters, then its values."""
        parameters = self.plan.parameters
        inputs = [(tensor, layout[self.index]) for tensor, layout in placements(operator.inputs)]
        held = [(tensor, place) for tensor, place in inputs if tensor in parameters]
        values = [(tensor, place) for tensor, place in inputs if tensor not in parameters]
        split = not self.shares and any(is_split(place) for _, place in values)
        for tensor, place in held:
            if is_split(place):
                yield (
                    f"operator {name!r} splits parameter {tensor!r}, which belongs to no "
                    "linear layer or embedding"
                )
            elif split and place.kind is Kind.BROADCAST:
                yield (
                    f"operator {name!r} splits its values, so that the gradient of parameter "
                    f"{tensor!r} is to be added up"
                )
        for tensor, place in values:
            if self._travels(tensor, place):
                yield (
                    f"tensor {tensor!r} is redistributed for operator {name!r}, between "
                    "modules that have styles"
                )

    def _travels(self, tensor: str, needed: Placement) -> bool:
        """Whether a value is redistributed for a reader, other than by the target itself."""
        if tensor in self.plan.model.inputs and needed.dim == 0:
            return False  # the target hands out the batch
        chains = [
            (parse_layout(chain[0])[self.index], parse_layout(chain[-1])[self.index])
            for chain in self.plan.redistributions.get(tensor, ())
        ]
        if self._is_styled(tensor) and len({after for _, after in chains}) == 1:
            return False  # a styled module redistributes its own output, in one way
        return any(after == needed and self._moves(before, after) for before, after in chains)

    def _is_styled(self, tensor: str) -> bool:
        """Whether a styled module makes a value."""
        return any(
            tensor == output
            for name in self.styled
            for output, _ in self.plan.operators[name].outputs
        )

    def _moves(self, before: Placement, after: Placement) -> bool:
        """Whether a value is sliced or gathered."""
        if self.shares and all(not is_split(place) or place.dim == 0 for place in (before, after)):
            return False
        # The module that makes a partial sum reduces it.
        if before == after or before.kind is Kind.PARTIAL:
            return False
        return is_split(before) or is_split(after)
