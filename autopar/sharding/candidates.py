"""Candidate strategies: for every mesh axis a factor of the rule, or none, and the layouts that follow from it.

On one axis an operator chooses one *option*:

    f      split factor f: tensors with f are S, inputs without it B, outputs that lost it P, addends P
    f/q    the same, within each of q equal parts of f
    R      none, computed redundantly: everything R
    B      none, gradients as shares: everything B
    P      a partial sum passes through an operator that is linear in the inputs that carry it

The placements of an option do not depend on the other axes, so a strategy is one option an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..ir import Tensor
from .communication import COMMUNICATIONS
from .layout import B, Kind, Layout, P, Placement, R, S
from .notation import Dims, Rule
from .rules import RULES, Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice of an operator on one axis.

    `factor`: index of the split factor, -1 for none. `parts`: equal parts of the factor, each of which is split.
    `inputs`, `outputs`: the placement of each tensor. `limit`: the largest number of shards (0: any number).
    `communication`: the word of a split that communicates inside the operator. Such an option is taken on one axis only
    and splits its `partners` along with the factor. With `beside`, the partners may be split on other axes too, within
    `inner_parts` equal parts.
    """

    name: str
    factor: int
    parts: int
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    partners: tuple[int, ...] = ()
    communication: str | None = None
    limit: int = 0
    beside: bool = False
    inner_parts: int = 1

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        """The factors that it splits as other axes may, each with the number of its parts."""
        own = ((self.factor, self.parts),) if self.factor >= 0 else ()
        return (*own, *((partner, self.inner_parts) for partner in self.partners if self.beside))


def parts_of(dims: Dims, factor: int, parts: int, sizes: Sequence[int]) -> Placement | None:
    """Placement of a tensor when `factor` is split within `parts` parts: the terms outside it multiply the parts."""
    for index, dim in enumerate(dims):
        if factor in dim:
            return S(index, parts * math.prod(sizes[f] for f in dim[: dim.index(factor)]))
    return None


def options_of(call: Call, rule: Rule, gradients: frozenset[str], variants: Mapping[int, Sequence[int]]) -> tuple[Option, ...]:
    """All options of an operator on one axis, `R` first; `variants` gives the parts in which a factor may be split."""
    sizes = [factor.size for factor in rule.factors]
    found: list[Option] = []
    for index, factor in enumerate(rule.factors):
        if factor.whole or factor.size <= 1:
            continue
        alone = bool(call.get("cross_batch"))
        for parts in variants.get(index, (1,)) if alone or factor.communication is None or factor.special is not None else ():
            option = _split(call, rule, index, parts, sizes)
            if option is not None:
                found.append(option)
        found += () if alone else _communicating(call, rule, index, sizes, variants)
    none = Option(name="R", factor=-1, parts=1, inputs=(R,) * len(call.inputs), outputs=(R,) * len(call.outputs))
    share = Option(name="B", factor=-1, parts=1, inputs=(B,) * len(call.inputs), outputs=(B,) * len(call.outputs))
    options = [none, share, *found, *_partial(call, rule)]
    return _normalised(options, call, gradients)


def _split(call: Call, rule: Rule, index: int, parts: int, sizes: Sequence[int]) -> Option | None:
    factor = rule.factors[index]
    outputs: list[Placement] = []
    for dims, tensor in zip(rule.outputs, call.outputs, strict=True):
        placement = parts_of(dims, index, parts, sizes)
        if placement is None and call.get("cross_batch"):
            placement = B  # each rank's result is that of its own part of the batch
        elif placement is None:
            if factor.reduction not in ("sum", "mean") or not _can_be_partial(tensor):
                return None
            placement = P
        outputs.append(placement)
    reduced = any(placement == P for placement in outputs)
    inputs = tuple(
        parts_of(dims, index, parts, sizes) or (P if reduced and position in rule.addends else B)
        for position, dims in enumerate(rule.inputs)
    )
    name = factor.name if parts == 1 else f"{factor.name}/{parts}"
    return Option(name=name, factor=index, parts=parts, inputs=inputs, outputs=tuple(outputs))


def _communicating(call: Call, rule: Rule, index: int, sizes: Sequence[int], variants: Mapping[int, Sequence[int]]) -> Iterator[Option]:
    """Splits that communicate inside: outputs without the factor are complete on every rank."""
    factor = rule.factors[index]
    if factor.communication is None:
        return
    limit = COMMUNICATIONS[factor.communication].limit(call, rule, index)
    if limit == 1:
        return
    beside = COMMUNICATIONS[factor.communication].beside(call)
    name = "+".join(rule.factors[member].name for member in (index, *factor.partners)) if factor.special else factor.name
    for parts in variants.get(factor.partners[0], (1,)) if beside else (1,):

        def placement(dims: Dims, other: Placement, parts: int = parts) -> Placement:
            found = (parts_of(dims, member, 1 if member == index else parts, sizes) for member in (index, *factor.partners))
            return next((place for place in found if place is not None), other)

        yield Option(
            name=name if parts == 1 else f"{name}/{parts}", factor=index, parts=1, inputs=tuple(placement(dims, B) for dims in rule.inputs),
            outputs=tuple(placement(dims, R) for dims in rule.outputs), partners=factor.partners, communication=factor.communication,
            limit=limit, beside=beside, inner_parts=parts,
        )  # fmt: skip


def _can_be_partial(tensor: Tensor) -> bool:
    """Whether shares of the tensor can be added up: eight bits are too few to round each of them."""
    return tensor.is_float and not tensor.dtype.startswith("float8")


def _partial(call: Call, rule: Rule) -> list[Option]:
    """Options that pass a partial sum through inputs in which the operator is jointly linear.

    Addends join the partial sum once; the other inputs are shares.
    """
    found = []
    for group in RULES[call.operator.kind].linear:
        carriers = {*group, *rule.addends}
        if not all(i < len(call.inputs) for i in carriers):
            continue
        if all(map(_can_be_partial, (*(call.inputs[i] for i in carriers), *call.outputs))):
            inputs = tuple(P if i in carriers else B for i in range(len(call.inputs)))
            name = "P" if group == RULES[call.operator.kind].linear[0] else "P" + "".join(map(str, group))
            found.append(Option(name=name, factor=-1, parts=1, inputs=inputs, outputs=(P,) * len(call.outputs)))
    return found


def _normalised(options: Sequence[Option], call: Call, gradients: frozenset[str]) -> tuple[Option, ...]:
    """Replace B by R for tensors without a gradient, and drop options that become equal."""

    def plain(placement: Placement, tensor: Tensor) -> Placement:
        return R if placement == B and tensor.name not in gradients else placement

    kept: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], Option] = {}
    for option in options:
        inputs = tuple(map(plain, option.inputs, call.inputs))
        outputs = tuple(map(plain, option.outputs, call.outputs))
        fresh = replace(option, inputs=inputs, outputs=outputs)
        kept.setdefault((inputs, outputs), fresh)
    return tuple(kept.values())


def splits_plainly(option: Option, rule: Rule, names: Sequence[str]) -> bool:
    """Whether an option splits one of the factors `names` without communicating inside."""
    return option.factor >= 0 and option.communication is None and rule.factors[option.factor].name in names


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    """All strategies of one operator on a mesh: `choices[i, a]` is the option that strategy i takes on axis a."""

    rule: Rule
    options: tuple[Option, ...]
    choices: NDArray[np.int64]

    def names(self, index: int) -> tuple[str, ...]:
        """The option names of strategy `index`, one an axis."""
        return tuple(self.options[o].name for o in self.choices[index])

    def layouts(self, index: int) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """Layouts of the inputs and of the outputs under strategy `index`."""
        options = [self.options[o] for o in self.choices[index]]
        count = len(options[0].inputs) if options else len(self.rule.inputs)
        inputs = tuple(tuple(o.inputs[t] for o in options) for t in range(count))
        outputs = tuple(tuple(o.outputs[t] for o in options) for t in range(len(self.rule.outputs)))
        return inputs, outputs

    def degrees(self, mesh: Sequence[int]) -> NDArray[np.int64]:
        """Numbers of shares into which strategy i splits factor f: array [strategies, factors]."""
        return factor_degrees(self.options, self.choices, mesh, len(self.rule.factors))

    def plain_degree(self, mesh: Sequence[int], names: Sequence[str]) -> NDArray[np.int64]:
        """Shares into which each strategy splits the factors `names` without communication: array [strategies]."""
        plain = np.array([splits_plainly(option, self.rule, names) for option in self.options])
        return np.asarray(np.where(plain[self.choices], np.array(mesh, dtype=np.int64), 1).prod(axis=1))

    def travel_degree(self, mesh: Sequence[int]) -> NDArray[np.int64]:
        """Numbers of ranks from which rows come to each rank in strategy i: array [strategies]."""
        travels = np.array([option.communication == "dispatch" for option in self.options])
        return np.asarray(np.where(travels[self.choices], np.array(mesh, dtype=np.int64), 1).prod(axis=1))


def factor_degrees(options: Sequence[Option], choices: NDArray[np.int64], mesh: Sequence[int], factors: int) -> NDArray[np.int64]:
    """Product of the axis sizes on which each strategy splits each factor: array [strategies, factors]."""
    splits = np.zeros((len(options), factors), dtype=bool)
    for index, option in enumerate(options):
        splits[index, [f for f in (option.factor, *option.partners) if f >= 0]] = True
    degrees = np.ones((len(choices), factors), dtype=np.int64)
    for axis, size in enumerate(mesh):
        degrees *= np.where(splits[choices[:, axis]], size, 1)
    return degrees


def strategies_of(rule: Rule, options: Sequence[Option], mesh: Sequence[int]) -> Strategies:
    """Every combination of one option an axis in which all shards are equal in size."""
    grids = np.indices((len(options),) * len(mesh)).reshape(len(mesh), -1).T if mesh else np.zeros((1, 0), dtype=np.int64)
    valid = np.ones(len(grids), dtype=bool)
    by_factor: dict[int, dict[int, list[int]]] = {}
    for index, option in enumerate(options):
        for factor, parts in option.splits:
            by_factor.setdefault(factor, {}).setdefault(parts, []).append(index)
    for factor, members in by_factor.items():
        done = np.ones(len(grids), dtype=np.int64)
        for parts, alike in sorted(members.items()):
            degree = np.ones(len(grids), dtype=np.int64)
            taken = np.bincount(alike, minlength=len(options)) > 0
            for axis, size in enumerate(mesh):
                degree[taken[grids[:, axis]]] *= size
            used = degree > 1
            valid &= ~used | ((parts % done == 0) & (rule.factors[factor].size % (parts * degree) == 0))
            done = np.where(used, parts * degree, done)
    for index, option in enumerate(options):
        if option.communication is not None and not COMMUNICATIONS[option.communication].stacks:
            valid &= _in_one_group(index, option, options, grids, mesh, rule)
    return Strategies(rule=rule, options=tuple(options), choices=np.ascontiguousarray(grids[valid]))


def _in_one_group(
    index: int, option: Option, options: Sequence[Option], grids: NDArray[np.int64], mesh: Sequence[int], rule: Rule
) -> NDArray[np.bool_]:
    """Rows of `grids` in which a communicating option is either unused or used validly.

    Valid use: on one axis, or on several where its word joins them, within its limit, with no other axis splitting its
    factors.
    """
    members = {option.factor} if option.beside else {option.factor, *option.partners}
    touching = np.array([not members.isdisjoint((other.factor, *other.partners)) for other in options])
    sizes = np.array(mesh, dtype=np.int64)
    active = (grids == index) & (sizes > 1)
    degree, used = np.where(active, sizes, 1).prod(axis=1), active.sum(axis=1)
    alone = (touching[grids] & (sizes > 1)).sum(axis=1) == used
    if option.communication is not None and not COMMUNICATIONS[option.communication].joins:
        alone &= used <= 1
    even = np.all([rule.factors[f].size % degree == 0 for f in sorted(members)], axis=0)
    fits = np.asarray(degree <= option.limit if option.limit else even)
    return np.asarray(~active.any(axis=1) | (alone & even & fits), dtype=np.bool_)


def is_storable(layout: Layout, mesh: Sequence[int]) -> bool:
    """Whether torch's DTensor can describe the layout: a dim that is split within parts may be split on one axis only.

    >>> is_storable((S(0, 3), R), (2, 2)), is_storable((S(0, 3), S(0, 3)), (2, 2))
    (True, False)
    """
    splits = [placement for placement, size in zip(layout, mesh, strict=True) if placement.kind is Kind.SPLIT and size > 1]
    return all(p.parts == 1 or sum(q.dim == p.dim for q in splits) == 1 for p in splits)
