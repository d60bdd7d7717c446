"""How the modules of a model are split over a tensor axis: each linear layer and embedding by its weight, each norm by its values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ..plan import Plan
from ..plan_parts import OperatorPlan
from ..sharding.layout import Kind, Placement, parse_layout
from .setup import EMBEDDINGS, Setup, is_product, placements

Style = Literal["column", "row", "embedding rows", "embedding columns", "norm"]
Values = Literal["whole", "sequence", "features"]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
# Which dim of a weight is the output: [out, in] in torch's linear layers, [in, out] in products as ONNX and GPT-2 write them.
_OUTPUT_DIM: Mapping[str, int] = {
    "aten.linear.default": 0, "onnx.MatMul": 1, "aten.matmul.default": 1, "aten.mm.default": 1, "aten.addmm.default": 1,
}  # fmt: skip
_HOPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A module on the tensor axis: its style, in how many `parts` its features are split each (fused projections), and how its values
    come and leave."""

    style: Style
    parts: int = 1
    comes: Values = "whole"
    leaves: Values = "whole"


def splits_of(setup: Setup, target: str) -> dict[str, Split]:
    """The modules that the plan splits over its one tensor axis, equal layers as one pattern with `*`."""
    tensor = [index for index, axis in enumerate(setup.axes) if axis.work == "tensor"]
    setup.refuse(target, f"{len(tensor)} tensor axes" if len(tensor) > 1 else "")
    found: dict[str, Split] = {}
    for index in tensor:
        last = ""
        for name, operator in setup.plan.operators.items():
            module, split = _split_of(setup.plan, name, operator, index, target, setup)
            if split is None:
                continue
            found.setdefault(module, split)
            if found[module] != split:
                setup.refuse(target, f"module {module!r} is split in two ways")
            if split.style == "column":
                last = module
            elif split.style == "row":
                last = ""
        if last:  # what follows the last product is the loss, which other projects compute on whole outputs
            found[last] = Split(style="column", parts=found[last].parts, comes=found[last].comes, leaves="whole")
    return patterns(found, list(dict.fromkeys(name.rpartition(".")[0] for name in setup.plan.parameters)))


def _split_of(plan: Plan, name: str, operator: OperatorPlan, index: int, target: str, setup: Setup) -> tuple[str, Split | None]:
    inputs = placements(operator.inputs)
    held = [(n, layout[index]) for n, layout in inputs if n in plan.parameters]
    values = [(n, layout[index]) for n, layout in inputs if n not in plan.parameters]
    if not held or not values:
        return "", None
    weight, place = held[0]
    module = weight.rpartition(".")[0]
    if len(plan.parameters[weight].shape) == 1:
        sequence = not is_product(operator) and values[0][1].kind is Kind.SPLIT and values[0][1].dim == 1
        return module, Split(style="norm", comes="sequence", leaves="sequence") if sequence else None
    if place.kind is not Kind.SPLIT or not (is_product(operator) or operator.kind in EMBEDDINGS):
        return "", None
    if not weight.endswith(".weight"):
        setup.refuse(target, f"operator {name!r} splits {weight!r}, which is no weight of a linear layer or an embedding")
    leaves = _leaves(plan, operator, index)
    comes = _values(_source(plan, values[0][0], values[0][1], index))
    if operator.kind in EMBEDDINGS:
        return module, Split(style="embedding rows" if place.dim == 0 else "embedding columns", leaves=leaves)
    if operator.kind not in _OUTPUT_DIM:
        setup.refuse(target, f"operator {name!r} of kind {operator.kind} is no linear layer")
    if place.dim == _OUTPUT_DIM[operator.kind]:
        return module, Split(style="column", parts=place.parts, comes="whole" if comes == "features" else comes, leaves=leaves)
    return module, Split(style="row", parts=place.parts, comes=comes, leaves=leaves)


def _values(place: Placement) -> Values:
    if place.kind is not Kind.SPLIT:
        return "whole"
    return "sequence" if place.dim == 1 else "features"


def _source(plan: Plan, tensor: str, needed: Placement, index: int) -> Placement:
    """How a value was before it was redistributed for its reader."""
    for chain in plan.redistributions.get(tensor, ()):
        if parse_layout(chain[-1])[index] == needed:
            return parse_layout(chain[0])[index]
    return needed


def _leaves(plan: Plan, operator: OperatorPlan, index: int) -> Values:
    """How the value that an operator makes is read, through the bias and the casts that hand on a partial sum."""
    for _ in range(_HOPS):
        if not operator.outputs:
            break
        tensor, layout = placements(operator.outputs)[0]
        chains = plan.redistributions.get(tensor, ())
        if chains:
            return _values(parse_layout(chains[0][-1])[index])
        if layout[index].kind is not Kind.PARTIAL:
            return _values(layout[index])
        readers = [op for op in plan.operators.values() if any(name == tensor for name, _ in op.inputs) and op.outputs]
        if not readers:
            break
        operator = readers[0]
    return "whole"


def patterns(found: Mapping[str, Split], modules: Collection[str]) -> dict[str, Split]:
    """Those of the `modules` that are split, by pattern: where all layers of a list are split alike, the number is `*`.

    >>> both = Split(style="row")
    >>> list(patterns({"h.0.up": both, "h.1.up": both, "g.1.up": both}, ["h.0.up", "h.1.up", "g.0.up", "g.1.up"]))
    ['h.*.up', 'g.1.up']
    """
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in modules:
        by_pattern[_LAYER.sub("*", name)].append(name)
    out: dict[str, Split] = {}
    for pattern, names in by_pattern.items():
        splits = {found.get(name) for name in names}
        alike = splits.pop() if len(splits) == 1 else None
        out |= {pattern: alike} if alike else {name: found[name] for name in names if name in found}
    return out

