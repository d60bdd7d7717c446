"""Splits of modules over a tensor axis: each linear layer and embedding by its weight, each norm by its values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..plan import Plan
from ..plan_parts import OperatorPlan
from ..sharding.layout import Kind, Placement, parse_layout
from .coverage import uncovered
from .setup import EMBEDDINGS, Setup, is_product, placements

Style = Literal["column", "row", "embedding rows", "embedding columns", "norm"]
Values = Literal["whole", "batch", "sequence", "features"]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
# The output dim of a weight: [out, in] in torch's linear layers, [in, out] in ONNX. Other products are not linear
# layers of torch.
_OUTPUT_DIM: Mapping[str, int] = {"aten.linear.default": 0, "onnx.MatMul": 1}
_HOPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The split of a module on the tensor axis.

    `parts`: equal parts of its features, each of which is split (fused projections). `comes`, `leaves`: how its values
    come and leave. `dim`: of a norm, the dim along which its values are split.
    """

    style: Style
    parts: int = 1
    comes: Values = "whole"
    leaves: Values = "whole"
    dim: int = 1


def splits_of(setup: Setup, target: str) -> dict[str, Split]:
    """The modules that the plan splits over its one tensor axis, equal layers as one pattern with `*`."""
    tensor = [index for index, axis in enumerate(setup.axes) if axis.work == "tensor" or axis.mixed]
    setup.refuse(target, f"{len(tensor)} axes along which weights are split" if len(tensor) > 1 else "")
    found: dict[str, Split] = {}
    for index in tensor:
        styled, last = [], ""
        for name, operator in setup.plan.operators.items():
            module, split = _split_of(setup, target, name, operator, index)
            if split is None:
                continue
            split = _in_shares(split) if setup.axes[index].mixed else split
            styled.append(name)
            if found.setdefault(module, split) != split:
                setup.refuse(target, f"module {module!r} is split in two ways")
            last = module if split.style == "column" else "" if split.style == "row" else last
        odd = list(uncovered(setup.plan, index, styled, bool(setup.axes[index].mixed)))
        setup.refuse(target, *odd[:3], f"and {len(odd) - 3} more" if len(odd) > 3 else "")
        if last:  # behind the last product stands the loss, which other projects compute on whole outputs
            found[last] = replace(found[last], leaves="batch" if setup.axes[index].mixed else "whole")
    return patterns(found, list(dict.fromkeys((*(name.rpartition(".")[0] for name in setup.plan.parameters), *found))))


def _in_shares(split: Split) -> Split:
    """The split on ranks that have shares of the batch: work that the plan repeats on each rank is split too."""
    comes, leaves = ("batch" if place == "whole" else place for place in (split.comes, split.leaves))
    return replace(split, comes=comes, leaves=leaves)


def _split_of(setup: Setup, target: str, name: str, operator: OperatorPlan, index: int) -> tuple[str, Split | None]:
    plan, inputs = setup.plan, placements(operator.inputs)
    held = [(n, layout[index]) for n, layout in inputs if n in plan.parameters]
    values = [(n, layout[index]) for n, layout in inputs if n not in plan.parameters]
    if not held or not values:
        return "", None
    weight, place = held[0]
    module = _module(plan, name, weight)
    if len(plan.parameters[weight].shape) == 1:
        value = values[0][1]
        scaled = not is_product(operator) and value.kind is Kind.SPLIT and (value.dim or 0) > 0 and place.kind is not Kind.SPLIT
        return module, Split(style="norm", dim=value.dim or 0) if scaled else None
    if place.kind is not Kind.SPLIT or not (is_product(operator) or operator.kind in EMBEDDINGS):
        return "", None
    if not weight.endswith(".weight"):
        setup.refuse(target, f"operator {name!r} splits {weight!r}, which is no weight of a linear layer or an embedding")
    leaves = _leaves(plan, operator, index)
    comes = _values(_source(plan, values[0][0], values[0][1], index))
    if operator.kind in EMBEDDINGS:
        return module, Split(style="embedding rows" if place.dim == 0 else "embedding columns", comes=comes, leaves=leaves)
    others = [other for other in plan.operators if other != name and other.rpartition("/")[0] == module and "/" in other]
    if operator.kind not in _OUTPUT_DIM or others:
        setup.refuse(target, f"operator {name!r} of kind {operator.kind} splits the weight of a module that is no nn.Linear")
    if place.dim == _OUTPUT_DIM[operator.kind]:
        return module, Split(style="column", parts=place.parts, comes="whole" if comes == "features" else comes, leaves=leaves)
    return module, Split(style="row", parts=place.parts, comes=comes, leaves=leaves)


def _module(plan: Plan, name: str, weight: str) -> str:
    """The module whose weight an operator reads; a tied weight has the name of the first module that holds it."""
    owner, called = weight.rpartition(".")[0], name.rpartition("/")[0]
    alone = called and not any(other != name and other.rpartition("/")[0] == called for other in plan.operators)
    return called if alone else owner


def _values(place: Placement) -> Values:
    if place.kind is not Kind.SPLIT:
        return "whole"
    return "batch" if place.dim == 0 else "sequence" if place.dim == 1 else "features"


def _source(plan: Plan, tensor: str, needed: Placement, index: int) -> Placement:
    """A value's placement before its redistribution for a reader."""
    for chain in plan.redistributions.get(tensor, ()):
        if parse_layout(chain[-1])[index] == needed:
            return parse_layout(chain[0])[index]
    return needed


def _leaves(plan: Plan, operator: OperatorPlan, index: int) -> Values:
    """The layout in which an operator's result is read, behind the bias and the casts that pass on a partial sum."""
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
    """The split modules by pattern: where all layers of a list are split alike, the number is `*`.

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

