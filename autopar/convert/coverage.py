"""Work of a plan on a tensor axis outside styled modules: styles slice, gather and split nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..plan import Plan
from ..sharding.layout import Kind, Placement, parse_layout
from .setup import is_product, placements


def uncovered(plan: Plan, index: int, styled: Sequence[str], shares: bool) -> Iterable[str]:
    """Sentences on parameters that are split and values that travel at operators without a style, up to the loss.

    `shares`: the target gives every rank its share of the batch, which for values is as good as the whole.
    """
    weighed = [name for name, op in plan.operators.items() if is_product(op) and any(t in plan.parameters for t, _ in op.inputs)]
    made = {tensor for name in styled for tensor, _ in plan.operators[name].outputs}
    for name, operator in plan.operators.items():
        if name not in styled:
            inputs = [(tensor, layout[index]) for tensor, layout in placements(operator.inputs)]
            held = [(tensor, place) for tensor, place in inputs if tensor in plan.parameters]
            values = [(tensor, place) for tensor, place in inputs if tensor not in plan.parameters]
            split = not shares and any(place.kind is Kind.SPLIT for _, place in values)
            for tensor, place in held:
                if place.kind is Kind.SPLIT:
                    yield f"operator {name!r} splits parameter {tensor!r}, which belongs to no linear layer or embedding"
                elif split and place.kind is Kind.BROADCAST:
                    yield f"operator {name!r} splits its values, so that the gradient of parameter {tensor!r} is to be added up"
            for tensor, place in values:
                if not (tensor in plan.model.inputs and place.dim == 0) and _travels(plan, tensor, place, index, shares, tensor in made):
                    yield f"tensor {tensor!r} is redistributed for operator {name!r}, between modules that have styles"
        if name == weighed[-1]:
            return


def _travels(plan: Plan, tensor: str, needed: Placement, index: int, shares: bool, made: bool) -> bool:
    """Whether a value is redistributed for a reader; a styled module redistributes its own output, in one way."""
    chains = [(parse_layout(chain[0])[index], parse_layout(chain[-1])[index]) for chain in plan.redistributions.get(tensor, ())]
    if made and len({after for _, after in chains}) == 1:
        return False
    return any(after == needed and _moves(before, after, shares) for before, after in chains)


def _moves(before: Placement, after: Placement, shares: bool) -> bool:
    """Whether a value is sliced or gathered; partial sums are reduced by the module that made them."""
    if shares and all(place.kind is not Kind.SPLIT or place.dim == 0 for place in (before, after)):
        return False
    return before != after and before.kind is not Kind.PARTIAL and Kind.SPLIT in (before.kind, after.kind)
