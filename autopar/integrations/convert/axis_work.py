"""The work that a plan does along each mesh axis: its products vote, and most of them name it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.ir.recipes import ATTENTIONS
from autopar.plan import Plan
from autopar.plan_parts import OperatorPlan
from autopar.sharding.layout import Kind, Layout, Placement, parse_layout
from autopar.sharding.rules import is_product as multiplies
from autopar.sharding.rules.experts import EXPERTS

Work = Literal["data", "tensor", "sequence", "ulysses", "expert", "idle"]
EMBEDDINGS = ("aten.embedding.default",)
FLAT = ("aten.bmm.default",)
"""Products whose first dim is of batch and heads."""
TWO = 2
WORDS: Mapping[Work, str] = {
    "data": "split the batch",
    "tensor": "split their weights",
    "sequence": "split the sequence",
    "ulysses": "split the sequence",
    "expert": "split the experts",
    "idle": "are repeated",
}
"""The predicate of operators that do a kind of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWork:
    """The work of a mesh axis.

    `stored_split`: whether parameters that are used whole on it are stored split. `repeated`: the
    number of products that the plan repeats on every device of the axis; the target splits them
    like the others, with the same values. `mixed`: operators that do other work, by its kind.
    `share`: the share of operators that do the axis's own work. `whole_experts`: whether experts
    that are used split on it are stored whole. `odd_heads`: an attention whose query heads are
    split on it, and whose fewer key-value heads are not. `folded`: whether whole experts lie on the
    devices of an axis that splits all other weights.
    """

    name: str
    size: int
    work: Work
    stored_split: bool
    repeated: int = 0
    mixed: Mapping[Work, Sequence[str]] = field(default_factory=dict)
    share: float = 1.0
    whole_experts: bool = False
    odd_heads: str = ""
    folded: bool = False

    def odd(self) -> str:
        """The operators that do other work, counted by its kind."""
        return ", ".join(
            f"{len(names)} {WORDS[kind]} (such as {names[0]})" for kind, names in self.mixed.items()
        )


def axis_work(plan: Plan, index: int) -> AxisWork:
    """The work of most products on an axis, and the other kinds of work there."""
    axis = plan.mesh[index]
    names: dict[Work, list[str]] = defaultdict(list)
    weights = _weights(plan)
    for name, operator in plan.operators.items():
        kind = _work(plan, operator, index, weights)
        if kind is not None:
            names[kind].append(name)
    # A product that is repeated on every device says nothing about the axis.
    kinds = [kind for kind in names if kind != "idle"]
    if "expert" in kinds and set(kinds) <= {"expert", "data"}:
        kinds = ["expert"]  # devices that split experts split the batch of everything else
    work: Work = "idle"
    share = 1.0
    if kinds:
        work = max(kinds, key=lambda kind: len(names[kind]))
        share = len(names[work]) / sum(len(names[kind]) for kind in kinds)
    attentions = [name for name in plan.operators if _heads(plan, name, index, weights)]
    folded = work == "tensor" and "expert" in kinds and _folds(plan, names)
    mixed: dict[Work, tuple[str, ...]] = {
        kind: tuple(names[kind])
        for kind in kinds
        if kind != work and not (folded and kind == "expert")
    }
    if folded:
        share += len(names["expert"]) / sum(len(names[kind]) for kind in kinds)
    repeated = 0 if work in ("idle", "tensor") else len(names["idle"])
    if work == "tensor":
        repeated = sum(_is_whole(plan, name, index) for name in plan.operators)
    if work == "sequence" and attentions:
        work = "ulysses"
    return AxisWork(
        name=axis.name,
        size=axis.size,
        work=work,
        stored_split=_stored_split(plan, index),
        repeated=repeated,
        mixed=mixed,
        share=share,
        whole_experts=work == "expert" and _whole_experts(plan, index),
        odd_heads=next((name for name in attentions if _is_odd(plan, name, index)), ""),
        folded=folded,
    )


def _folds(plan: Plan, names: Mapping[Work, Sequence[str]]) -> bool:
    """Whether all layers of experts are split by experts, and by nothing else."""
    return not any(
        plan.operators[name].kind == EXPERTS
        for kind, some in names.items()
        if kind != "expert"
        for name in some
    )


def placements(places: Iterable[tuple[str, str]]) -> list[tuple[str, Layout]]:
    """Tensors with their layouts."""
    return [(name, parse_layout(text)) for name, text in places]


def is_product(operator: OperatorPlan) -> bool:
    """Whether the operator multiplies."""
    return multiplies(operator.kind)


def is_split(place: Placement) -> bool:
    """Whether a tensor is split on an axis."""
    return place.kind is Kind.SPLIT


def _weights(plan: Plan) -> frozenset[str]:
    """Parameters of several dims, and what is made of them alone, as by a transpose."""
    weights = {name for name, parameter in plan.parameters.items() if len(parameter.shape) > 1}
    for operator in plan.operators.values():
        if operator.inputs and all(name in weights for name, _ in operator.inputs):
            weights.update(name for name, _ in operator.outputs)
    return frozenset(weights)


def _work(plan: Plan, operator: OperatorPlan, index: int, held: frozenset[str]) -> Work | None:
    """The work of a weight's product with a value, or of a split embedding; None for others."""
    if not is_product(operator) and operator.kind not in EMBEDDINGS:
        return None
    inputs = placements(operator.inputs)
    weights = [layout[index] for name, layout in inputs if name in held]
    values = [
        layout[index] for name, layout in inputs if name not in held and name not in plan.parameters
    ]
    if not weights or not values:
        return None
    splits = [place for place in weights if is_split(place)]
    if splits:
        # The first dim of grouped weights numbers the experts.
        by_expert = operator.kind == EXPERTS and any(place.dim == 0 for place in splits)
        return "expert" if by_expert else "tensor"
    if operator.kind in EMBEDDINGS:
        return None
    if not is_split(values[0]):
        return "idle"
    return "data" if values[0].dim == 0 else "sequence"


def _values(plan: Plan, name: str, held: frozenset[str]) -> list[Layout]:
    """The layouts of the values that an operator multiplies with each other, if it does."""
    operator = plan.operators[name]
    if not is_product(operator):
        return []
    values = placements(operator.inputs)
    return [layout for tensor, layout in values if tensor not in held]


def _heads(plan: Plan, name: str, index: int, held: frozenset[str]) -> bool:
    """Whether an operator multiplies values of several heads, which are split on an axis."""
    values = _values(plan, name, held)
    if len(values) < TWO or len(values) < len(plan.operators[name].inputs):
        return False
    # [batch x heads, ...] of a product, [batch, heads, ...] of an attention.
    dim = 0 if plan.operators[name].kind in FLAT else 1
    return is_split(values[0][index]) and values[0][index].dim == dim


def _is_whole(plan: Plan, name: str, index: int) -> bool:
    """Whether an operator is an attention that every device of an axis computes."""
    operator = plan.operators[name]
    layouts = [layout for _, layout in placements(operator.inputs)]
    return operator.kind in ATTENTIONS and not any(is_split(layout[index]) for layout in layouts)


def _is_odd(plan: Plan, name: str, index: int) -> bool:
    """Whether an attention's keys are whole where its queries are split."""
    (_, query), (_, key), *_ = placements(plan.operators[name].inputs)
    return is_split(query[index]) and not is_split(key[index])


def _whole_experts(plan: Plan, index: int) -> bool:
    """Whether nothing that is made of a parameter, and used split by experts, is stored split."""
    made = {
        output: name
        for operator in plan.operators.values()
        for name, _ in operator.inputs[:1]
        for output, _ in operator.outputs
        if name in plan.parameters
    }
    read = {
        made.get(name, name)
        for operator in plan.operators.values()
        if operator.kind == EXPERTS
        for name, _ in operator.inputs
    }
    stored = [plan.parameters[name].storage for name in read if name in plan.parameters]
    return bool(stored) and not any(is_split(parse_layout(text)[index]) for text in stored)


def _stored_split(plan: Plan, index: int) -> bool:
    """Whether some parameter is stored split on an axis on which no operator reads it split."""
    uses: dict[str, list[Placement]] = defaultdict(list)
    for operator in plan.operators.values():
        for name, layout in placements(operator.inputs):
            if name in plan.parameters:
                uses[name].append(layout[index])
    return any(
        is_split(parse_layout(parameter.storage)[index]) and not any(map(is_split, uses[name]))
        for name, parameter in plan.parameters.items()
    )
