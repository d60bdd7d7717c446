"""Splits of modules over a tensor axis.

A linear layer or an embedding is split by its weight, a norm by its values.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autopar.plan import Plan
from autopar.plan_parts import OperatorPlan
from autopar.sharding.layout import Kind, Placement, parse_layout

from .axis_work import EMBEDDINGS, is_product, is_split, placements
from .coverage import uncovered
from .setup import Setup
from .splittable import OUTPUT_DIM, Owners

Style = Literal["column", "row", "embedding rows", "embedding columns", "norm"]
Values = Literal["whole", "batch", "sequence", "features"]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_HOPS = 4
"""Operators behind a product through which a partial sum is followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The split of a module on the tensor axis.

    `parts`: equal parts of its features, each of which is split (fused projections). `comes`,
    `leaves`: how its values come and leave. `dim`: of a norm, the dim along which its values are
    split.
    """

    style: Style
    parts: int = 1
    comes: Values = "whole"
    leaves: Values = "whole"
    dim: int = 1


def splits_of(setup: Setup, target: str) -> dict[str, Split]:
    """The modules that the plan splits over its one tensor axis.

    Equal layers are one pattern with `*`.
    """
    tensor = [index for index, axis in enumerate(setup.axes) if axis.work == "tensor" or axis.mixed]
    if len(tensor) > 1:
        setup.refuse(target, f"{len(tensor)} axes along which weights are split")
    splits = _on_axis(setup, target, tensor[0]) if tensor else {}
    owners = [name.rpartition(".")[0] for name in setup.plan.parameters]
    return patterns(splits, list(dict.fromkeys((*owners, *splits))))


def _on_axis(setup: Setup, target: str, index: int) -> dict[str, Split]:
    """The splits of modules on one axis; a plan that has other work there is refused."""
    shares = bool(setup.axes[index].mixed)
    splits: dict[str, Split] = {}
    styled = []
    # A shared weight is held by a module that may not run itself (T5's `shared`).
    holders: dict[str, Split] = {}
    owners = Owners.of(setup.plan.operators)
    last = ""  # the module whose features are still split behind it
    for name, operator in setup.plan.operators.items():
        module, split = _split_of(setup, target, (name, operator), index, owners)
        if split is None:
            continue
        if shares:
            split = _in_shares(split)
        styled.append(name)
        held = [tensor for tensor, _ in operator.inputs if tensor in setup.plan.parameters]
        holders.setdefault(held[0].rpartition(".")[0], split)
        if splits.setdefault(module, split) != split:
            setup.refuse(target, f"module {module!r} is split in two ways")
        if split.style in ("column", "row"):
            last = module if split.style == "column" else ""
    odd = [*_shared(setup.plan, index), *uncovered(setup.plan, index, styled, shares)]
    if len(odd) > 3:
        odd[3:] = [f"and {len(odd) - 3} more"]
    setup.refuse(target, *odd)
    if last:
        # Behind the last product stands the loss, which other projects compute on whole outputs.
        splits[last] = replace(splits[last], leaves="batch" if shares else "whole")
    return holders | splits


def _shared(plan: Plan, index: int) -> Iterator[str]:
    """Sentences on weights that several operators share, and not all of them split."""
    read: dict[str, dict[bool, str]] = defaultdict(dict)
    for name, operator in plan.operators.items():
        if is_product(operator) or operator.kind in EMBEDDINGS:
            for tensor, layout in placements(operator.inputs):
                if tensor in plan.parameters:
                    read[tensor].setdefault(is_split(layout[index]), name)
    for tensor, readers in read.items():
        if len(readers) > 1:
            yield f"operator {readers[True]!r} splits {tensor!r}, and {readers[False]!r} does not"


def _in_shares(split: Split) -> Split:
    """The split on ranks that have shares of the batch.

    Work that the plan repeats on each rank is split too.
    """
    if split.comes == "whole":
        split = replace(split, comes="batch")
    if split.leaves == "whole":
        split = replace(split, leaves="batch")
    return split


def _split_of(
    setup: Setup, target: str, named: tuple[str, OperatorPlan], index: int, owners: Owners
) -> tuple[str, Split | None]:
    """The module that runs an operator, and its split on an axis; None if it has none."""
    plan = setup.plan
    name, operator = named
    inputs = placements(operator.inputs)
    held = [(tensor, layout[index]) for tensor, layout in inputs if tensor in plan.parameters]
    values = [(tensor, layout[index]) for tensor, layout in inputs if tensor not in plan.parameters]
    if not held or not values:
        return "", None
    weight, place = held[0]
    value, value_place = values[0]
    module = owners.module(name, weight)
    if len(plan.parameters[weight].shape) == 1:
        return module, _norm(operator, place, value_place)
    if not is_split(place) or not (is_product(operator) or operator.kind in EMBEDDINGS):
        return "", None
    if not weight.endswith(".weight"):
        setup.refuse(
            target,
            f"operator {name!r} splits {weight!r}, which is no weight of a linear layer or an "
            "embedding",
        )
    comes = _values(_source(plan, value, value_place, index))
    leaves = _leaves(plan, operator, index)
    if operator.kind in EMBEDDINGS:
        style: Style = "embedding rows" if place.dim == 0 else "embedding columns"
        return module, Split(style=style, comes=comes, leaves=leaves)
    if place.dim != OUTPUT_DIM[operator.kind]:
        return module, Split(style="row", parts=place.parts, comes=comes, leaves=leaves)
    if comes == "features":
        comes = "whole"
    return module, Split(style="column", parts=place.parts, comes=comes, leaves=leaves)


def _norm(operator: OperatorPlan, place: Placement, value: Placement) -> Split | None:
    """The split of a norm, whose whole weight scales values split along a dim but the first."""
    if is_product(operator) or is_split(place) or not is_split(value) or not value.dim:
        return None
    return Split(style="norm", dim=value.dim)


def _values(place: Placement) -> Values:
    if not is_split(place):
        return "whole"
    if place.dim == 0:
        return "batch"
    return "sequence" if place.dim == 1 else "features"


def _source(plan: Plan, tensor: str, needed: Placement, index: int) -> Placement:
    """A value's placement before its redistribution for a reader."""
    for chain in plan.redistributions.get(tensor, ()):
        if parse_layout(chain[-1])[index] == needed:
            return parse_layout(chain[0])[index]
    return needed


def _leaves(plan: Plan, operator: OperatorPlan, index: int) -> Values:
    """The layout in which an operator's result is read.

    A bias and casts that only pass a partial sum on are skipped.
    """
    for _ in range(_HOPS):
        if not operator.outputs:
            break
        tensor, layout = placements(operator.outputs)[0]
        chains = plan.redistributions.get(tensor, ())
        if chains:
            return _values(parse_layout(chains[0][-1])[index])
        if layout[index].kind is not Kind.PARTIAL:
            return _values(layout[index])
        readers = [
            op
            for op in plan.operators.values()
            if any(name == tensor for name, _ in op.inputs) and op.outputs
        ]
        if not readers:
            break
        operator = readers[0]
    return "whole"


def patterns(splits_by_module: Mapping[str, Split], modules: Collection[str]) -> dict[str, Split]:
    """The split modules by pattern: where all layers of a list are split alike, the number is `*`.

    >>> split = Split(style="row")
    >>> modules = ["h.0.up", "h.1.up", "g.0.up", "g.1.up"]
    >>> list(patterns({"h.0.up": split, "h.1.up": split, "g.1.up": split}, modules))
    ['h.*.up', 'g.1.up']
    """
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in modules:
        by_pattern[_LAYER.sub("*", name)].append(name)
    merged: dict[str, Split] = {}
    for pattern, names in by_pattern.items():
        first = splits_by_module.get(names[0])
        if first and all(splits_by_module.get(name) == first for name in names):
            merged[pattern] = first
        else:
            merged |= {name: splits_by_module[name] for name in names if name in splits_by_module}
    return merged
