"""Candidate strategies: for every mesh axis a factor of the rule or none, and their layouts.

On one axis an operator chooses one *option*:

    f      split factor f: tensors with f are S, inputs without it B, outputs that lost it P,
           addends P
    f/q    the same, within each of q equal parts of f
    f:w    the same placements as f, by another way of communication: the word w
    R      none, computed redundantly: everything R
    B      none, gradients as shares: everything B
    P      a partial sum passes through an operator that is linear in the inputs that carry it

The placements of an option do not depend on the other axes, so a strategy is one option an axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Tensor

from .communication import COMMUNICATIONS
from .layout import B, Kind, Layout, P, Placement, R, S, local_shape
from .notation import ONCE, Dims, Rule
from .rules import RULES, Call
from .rules.narrow_products import rounds
from .strategies import Option, Strategies


def parts_of(dims: Dims, factor: int, parts: int, sizes: Sequence[int]) -> Placement | None:
    """Placement of a tensor when `factor` is split within `parts` parts.

    The terms outside the factor multiply the parts.
    """
    for index, dim in enumerate(dims):
        if factor in dim:
            return S(index, parts * math.prod(sizes[f] for f in dim[: dim.index(factor)]))
    return None


def options_of(
    call: Call, rule: Rule, gradients: frozenset[str], variants: Mapping[int, Sequence[int]]
) -> tuple[Option, ...]:
    """All options of an operator on one axis, `R` first.

    `variants` gives the parts in which a factor may be split.
    """
    sizes = [factor.size for factor in rule.factors]
    splits: list[Option] = []
    for index, factor in enumerate(rule.factors):
        if factor.whole or factor.size <= 1:
            continue
        # Where a module is marked `cross_batch`, each rank's result is that of its own part of the
        # batch, so a split does not communicate.
        alone = bool(call.get("cross_batch"))
        for parts in (
            # A factor whose split communicates has the plain split too if `special` names its local
            # form.
            variants.get(index, (1,))
            if alone or not factor.communications or factor.special is not None
            else ()
        ):
            option = _split(call, rule, index, parts, sizes)
            if option is not None:
                splits.append(option)
        splits += () if alone else _communicating(call, rule, index, sizes, variants)
    none = Option(
        name="R",
        factor=-1,
        parts=1,
        inputs=(R,) * len(call.inputs),
        outputs=(R,) * len(call.outputs),
    )
    share = Option(
        name="B",
        factor=-1,
        parts=1,
        inputs=(B,) * len(call.inputs),
        outputs=(B,) * len(call.outputs),
    )
    # Of options that become equal, `_normalised` keeps the first: R comes before B. Operands are
    # rounded neither as partial sums nor, in the backward pass, as shares of a gradient.
    linear = [] if rounds(call) else [share, *_partial(call, rule)]
    options = [none, *linear[:1], *splits, *linear[1:]]
    return _normalised(options, call, gradients)


def _split(call: Call, rule: Rule, index: int, parts: int, sizes: Sequence[int]) -> Option | None:
    factor = rule.factors[index]
    outputs: list[Placement] = []
    for dims, tensor in zip(rule.outputs, call.outputs, strict=True):
        placement = parts_of(dims, index, parts, sizes)
        if placement is None and call.get("cross_batch"):
            placement = B  # each rank's result is that of its own part of the batch
        elif placement is None:
            # Shares are added up. A rank's share of a mean is its own mean divided by the number of
            # ranks; a maximum or minimum has none.
            if factor.reduction not in ("sum", "mean") or not can_be_partial(tensor):
                return None
            placement = P
        outputs.append(placement)
    reduced = any(placement == P for placement in outputs)
    # Each share would hold the addend once more, so where the output is a share the addend is one.
    inputs = tuple(
        parts_of(dims, index, parts, sizes) or (P if reduced and position in rule.addends else B)
        for position, dims in enumerate(rule.inputs)
    )
    name = factor.name if parts == 1 else f"{factor.name}/{parts}"
    return Option(name=name, factor=index, parts=parts, inputs=inputs, outputs=tuple(outputs))


def _communicating(
    call: Call, rule: Rule, index: int, sizes: Sequence[int], variants: Mapping[int, Sequence[int]]
) -> Iterator[Option]:
    """Splits that communicate inside: outputs without the factor are complete on every rank."""
    factor = rule.factors[index]
    # With `special` the plain split already has the factor's name.
    name = (
        "+".join(rule.factors[member].name for member in (index, *factor.partners))
        if factor.special
        else factor.name
    )
    for place, word in enumerate(factor.communications):
        # The first word of a factor is not told in the name.
        how = f":{word}" if place else ""
        for option in _of_word(call, rule, index, word, sizes, variants):
            parts = f"/{option.inner_parts}" if option.inner_parts > 1 else ""
            yield replace(option, name=f"{name}{parts}{how}")


def _of_word(
    call: Call,
    rule: Rule,
    index: int,
    word: str,
    sizes: Sequence[int],
    variants: Mapping[int, Sequence[int]],
) -> Iterator[Option]:
    """The splits of a factor that communicate in the way of one word, without their names."""
    factor = rule.factors[index]
    limit = COMMUNICATIONS[word].limit(call, rule, index)
    if limit == 1:
        return
    beside = COMMUNICATIONS[word].beside(call)
    for parts in variants.get(factor.partners[0], (1,)) if beside else (1,):
        # `parts` is a default argument because a closure would look up the loop's variable when
        # called.
        def placement(dims: Dims, other: Placement, parts: int = parts) -> Placement:
            placements = (
                parts_of(dims, member, 1 if member == index else parts, sizes)
                for member in (index, *factor.partners)
            )
            return next((place for place in placements if place is not None), other)

        yield Option(
            name="",
            factor=index,
            parts=1,
            inputs=tuple(placement(dims, B) for dims in rule.inputs),
            outputs=tuple(placement(dims, R) for dims in rule.outputs),
            partners=factor.partners,
            communication=word,
            limit=limit,
            beside=beside,
            inner_parts=parts,
        )


def can_be_partial(tensor: Tensor) -> bool:
    """Whether shares of the tensor can be added up; eight bits are too few to round each share."""
    return tensor.is_float and not tensor.dtype.startswith("float8")


def _partial(call: Call, rule: Rule) -> list[Option]:
    """Options that pass a partial sum through inputs in which the operator is jointly linear.

    Addends join the partial sum once; the other inputs are shares.
    """
    passing = []
    groups = RULES[call.operator.kind].linear_in(call)
    for group in groups:
        carriers = {*group, *rule.addends}
        # A call may lack optional inputs at the end.
        if not all(i < len(call.inputs) for i in carriers):
            continue
        if all(map(can_be_partial, (*(call.inputs[i] for i in carriers), *call.outputs))):
            inputs = tuple(P if i in carriers else B for i in range(len(call.inputs)))
            name = "P" if group == groups[0] else "P" + "".join(map(str, group))
            passing.append(
                Option(
                    name=name, factor=-1, parts=1, inputs=inputs, outputs=(P,) * len(call.outputs)
                )
            )
    return passing


def _normalised(
    options: Sequence[Option], call: Call, gradients: frozenset[str]
) -> tuple[Option, ...]:
    """Replace B by R for tensors without a gradient, and drop options that become equal."""

    def plain(placement: Placement, tensor: Tensor) -> Placement:
        return R if placement == B and tensor.name not in gradients else placement

    distinct: dict[tuple[object, ...], Option] = {}
    for option in options:
        inputs = tuple(map(plain, option.inputs, call.inputs))
        outputs = tuple(map(plain, option.outputs, call.outputs))
        fresh = replace(option, inputs=inputs, outputs=outputs)
        # Two ways in which rows travel lead to the same placements.
        way = option.communication == ONCE
        distinct.setdefault((inputs, outputs, way), fresh)
    return tuple(distinct.values())


def strategies_of(rule: Rule, options: Sequence[Option], mesh: Sequence[int]) -> Strategies:
    """Every combination of one option an axis in which all shards are equal in size."""
    valid = np.ones((len(options),) * len(mesh), dtype=bool)
    by_factor: dict[int, dict[int, list[int]]] = {}
    for index, option in enumerate(options):
        for factor, parts in option.splits:
            by_factor.setdefault(factor, {}).setdefault(parts, []).append(index)
    for factor, members in by_factor.items():
        levels = sorted(members.items())
        parts_of_levels = tuple(parts for parts, _ in levels)
        divides = _divides(rule.factors[factor].size, parts_of_levels, tuple(mesh))
        # An entry of that table for every combination, as a sum over the axes.
        entries = np.zeros((1,) * len(mesh), dtype=np.int64)
        for axis in range(len(mesh)):
            bits = np.zeros(len(options), dtype=np.int64)
            for level, (_, alike) in enumerate(levels):
                bits[alike] = 1 << level * len(mesh) + axis
            entries = entries + bits.reshape([-1 if a == axis else 1 for a in range(len(mesh))])
        valid &= divides[entries]
    # Without axes there is one strategy, the empty one.
    choices = np.argwhere(valid) if mesh else np.zeros((1, 0), dtype=np.int64)
    for index, option in enumerate(options):
        # Options that stack may be taken on any axes, each exchange by itself.
        if option.communication is not None and not COMMUNICATIONS[option.communication].stacks:
            choices = choices[_in_one_group(index, option, options, choices, mesh, rule)]
    return Strategies(rule=rule, options=tuple(options), choices=np.ascontiguousarray(choices))


# The same few sizes are asked for again and again.
@functools.lru_cache(maxsize=1 << 12)
def _divides(size: int, levels: tuple[int, ...], mesh: tuple[int, ...]) -> NDArray[np.bool_]:
    """Whether splits of a factor give equal shards, by the axes that each level splits.

    `levels`: the parts of each level, ascending. Bit `level * axes + axis` of an entry's number
    says that the level splits the axis.
    """
    numbers = np.arange(1 << len(levels) * len(mesh))
    valid = np.ones(len(numbers), dtype=bool)
    done = np.ones(len(numbers), dtype=np.int64)
    # The rule of `is_valid`: from the outermost level inwards, each divides what the levels outside
    # leave.
    for level, parts in enumerate(levels):
        degree = np.ones(len(numbers), dtype=np.int64)
        for axis, devices in enumerate(mesh):
            degree[(numbers >> level * len(mesh) + axis) % 2 == 1] *= devices
        used = degree > 1
        valid &= ~used | ((parts % done == 0) & (size % (parts * degree) == 0))
        done = np.where(used, parts * degree, done)
    return valid


def _in_one_group(
    index: int,
    option: Option,
    options: Sequence[Option],
    grids: NDArray[np.int64],
    mesh: Sequence[int],
    rule: Rule,
) -> NDArray[np.bool_]:
    """Rows of `grids` in which a communicating option is either unused or used validly.

    Valid use: on one axis, or on several where its word joins them, within its limit, with no other
    axis splitting its factors.
    """
    # With `beside`, other axes may split the partners: only the factor is taken.
    members = {option.factor} if option.beside else {option.factor, *option.partners}
    touching = np.array(
        [not members.isdisjoint((other.factor, *other.partners)) for other in options]
    )
    sizes = np.array(mesh, dtype=np.int64)
    active = (grids == index) & (sizes > 1)
    degree = np.where(active, sizes, 1).prod(axis=1)
    used = active.sum(axis=1)
    alone = (touching[grids] & (sizes > 1)).sum(axis=1) == used
    if option.communication is not None and not COMMUNICATIONS[option.communication].joins:
        alone &= used <= 1
    even = np.all([rule.factors[f].size % degree == 0 for f in sorted(members)], axis=0)
    fits = np.asarray(degree <= option.limit if option.limit else even)
    return np.asarray(~active.any(axis=1) | (alone & even & fits), dtype=np.bool_)


def is_storable(layout: Layout, mesh: Sequence[int]) -> bool:
    """Whether torch's DTensor can describe the layout.

    A dim that is split within parts may be split on one axis only.

    >>> is_storable((S(0, 3), R), (2, 2)), is_storable((S(0, 3), S(0, 3)), (2, 2))
    (True, False)
    """
    splits = [
        placement
        for placement, size in zip(layout, mesh, strict=True)
        if placement.kind is Kind.SPLIT and size > 1
    ]
    return all(p.parts == 1 or sum(q.dim == p.dim for q in splits) == 1 for p in splits)


def cuts_no_byte(tensor: Tensor, layout: Layout, mesh: Sequence[int]) -> bool:
    """Whether shards of a parameter's narrow copy consist of whole bytes.

    Elements of fewer than 8 bits share one with their neighbours in the last dim.
    """
    if tensor.narrow is None:
        return True
    return local_shape(layout, tensor.shape, mesh)[-1] * tensor.narrow.bits % 8 == 0
