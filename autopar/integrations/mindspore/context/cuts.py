"""Cuts of operators as restrictions of the search.

Cut operators have these cuts, other operators follow the mode.

A cut of a dim is a cut of its factor (the outer one of several), and a factor is cut alike in all
inputs. On mesh axes that no cut needs, an operator keeps copies. The search finds a mesh with room
for the cuts, and their axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError
from autopar.ir import Graph, Operator, Tensor
from autopar.model import LoadedModel
from autopar.order.part_gathers import batch_of
from autopar.planning.model.restrictions import Limits
from autopar.schemes.axis import axis_limits
from autopar.schemes.axis_schemes import AXIS_SCHEMES
from autopar.schemes.splits import profiles_of
from autopar.search import NoAssignment
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.mesh import Mesh, factorisations
from autopar.sharding.rules import RULES
from autopar.sharding.strategies import Option, Strategies

from .marks import CUTS, Cuts, marked, strays

Bools = NDArray[np.bool_]


def cuts_of(model: LoadedModel) -> dict[str, Cuts]:
    """The cut operators of a model, by name, as its modules are marked.

    `UsageError` if its forward pass reaches a cut operator by no attribute.
    """
    for name in strays(model.given, CUTS):
        raise UsageError(
            f"shard of {name}: the cut operator is no attribute of the model. Keep it as one, as "
            "self.matmul, or in nn.ModuleList or nn.ModuleDict"
        )
    cuts_by_operator = {}
    for path, cuts in marked(model.given, CUTS):
        operator = _operator_of(model.graph, path, cuts)
        cuts_by_operator[operator.name] = cuts
    return cuts_by_operator


def _operator_of(graph: Graph, path: str, cuts: Cuts) -> Operator:
    """The one operator of the module at `path` that takes such inputs."""
    inside = [
        op for op in graph.operators if not path or op.name.startswith((f"{path}/", f"{path}."))
    ]
    fitting = [op for op in inside if _fits(graph, op, cuts)]
    heavy = [op for op in fitting if op.kind in RULES and RULES[op.kind].products]
    matches = heavy or fitting
    if len(matches) == 1:
        return matches[0]
    several = matches or inside
    shapes = ", ".join(f"{op.name} ({_shapes(graph, op)})" for op in several[:5]) or "none"
    many = "several operators take" if matches else "no operator takes"
    dims = ", ".join(str(len(cut)) for cut in cuts)
    raise UsageError(
        f"shard of {path or 'the model'!r}: {many} inputs of {dims} dims; its operators: {shapes}"
    )


def _fits(graph: Graph, operator: Operator, cuts: Cuts) -> bool:
    shapes = [graph.tensors[name].shape for name in operator.inputs]
    return len(shapes) >= len(cuts) and all(
        len(s) == len(c) for s, c in zip(shapes, cuts, strict=False)
    )


def _shapes(graph: Graph, operator: Operator) -> str:
    return ", ".join(
        "x".join(map(str, graph.tensors[name].shape)) or "()" for name in operator.inputs
    )


def wanted_degrees(name: str, offer: Offer, cuts: Cuts, devices: int) -> NDArray[np.int64]:
    """The number of parts of each factor of an operator.

    `UsageError` with the reason if the cuts do not fit.
    """
    factors = offer.rule.factors
    degrees: dict[int, int] = {}
    for index, (dims, cut) in enumerate(zip(offer.rule.inputs, cuts, strict=False)):
        for dim, (members, count) in enumerate(zip(dims, cut, strict=True)):
            where = f"dim {dim} of input {index}"
            size = offer.call.inputs[index].shape[dim]
            if size % count:
                raise _refusal(name, f"{where} has size {size}, which {count} does not divide")
            # The outer factors of a dim are cut first, each as often as its size allows.
            for factor in members:
                share = math.gcd(count, factors[factor].size)
                count //= share
                before = degrees.setdefault(factor, share)
                if before != share:
                    raise _refusal(
                        name,
                        f"{factors[factor].name} is cut into {before} parts in one input and into "
                        f"{share} in another; it is the same loop, cut it alike",
                    )
                if share > 1 and factors[factor].whole:
                    raise _refusal(name, f"{where} must be whole; {_divisible(offer)}")
            if count > 1:
                raise _refusal(name, f"{where} cannot be cut so; {_divisible(offer)}")
    parts = math.prod(degrees.values())
    if devices % parts:
        near = " and ".join(map(str, _divisors_beside(parts, devices)))
        raise _refusal(
            name,
            f"its cuts make {parts} parts, which do not divide the {devices} devices of a stage; "
            f"{near} would",
        )
    return np.array([degrees.get(factor, 1) for factor in range(len(factors))], dtype=np.int64)


def _refusal(name: str, reason: str) -> UsageError:
    return UsageError(f"shard of {name!r}: {reason}")


def _divisors_beside(number: int, whole: int) -> list[int]:
    """The largest divisor below a number, and the smallest above it."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    return [*[d for d in divisors if d < number][-1:], *[d for d in divisors if d > number][:1]]


def _divisible(offer: Offer) -> str:
    can = [
        f"dim {dim} of input {index}"
        for index, dims in enumerate(offer.rule.inputs)
        for dim, factors in enumerate(dims)
        if any(not offer.rule.factors[f].whole and offer.rule.factors[f].size > 1 for f in factors)
    ]
    return f"what can be cut: {', '.join(can) or 'nothing'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOperators:
    """A restriction of the search to cut operators.

    `cuts`: by operator. `stored`: the parts of parameters that no cut operator reads. `devices`: of
    a stage. `rest`: the axis scheme of all other operators, or None where they are free; if the
    devices then divide the global `batch`, they must divide every micro-batch too. A parameter that
    a cut operator reads is stored in its used layout; any other is stored whole if the other
    operators have a scheme. With `divided`, every parameter is stored in `parts` times as many
    parts where that is possible (None: as many as there can be).
    """

    cuts: Mapping[str, Cuts]
    devices: int
    batch: int = 0
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rest: str | None = None
    divided: bool = False
    parts: int | None = None

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits on a mesh.

        `NoAssignment` where it has no room for a cut, or is none of all devices of a stage.
        """
        if not self._fits_batch(analysis, mesh):
            raise NoAssignment
        by_name = {op.name: op for op in analysis.warm}
        wanted = {
            name: wanted_degrees(name, analysis.offers[name], cuts, mesh.devices)
            for name, cuts in self.cuts.items()
            if name in by_name
        }
        cuts = [list(map(int, degrees)) for degrees in wanted.values()]
        if self.rest is not None and cuts and len(mesh.axes) > axes_needed(cuts, mesh.devices):
            raise NoAssignment
        rest = Limits()
        if self.rest is not None:
            schemes = (AXIS_SCHEMES[self.rest],) * len(mesh.axes)
            rest = axis_limits(schemes, analysis, profiles_of(analysis), mesh)
        used = {
            tensor: self._used(by_name[name], tensor, name)
            for name in wanted
            for tensor in by_name[name].inputs
        } | dict(self.stored)

        def strategies(name: str, offer: Offer, candidates: Strategies) -> Bools:
            if name in wanted:
                return _cut_so(candidates, wanted[name], mesh)
            if rest.strategies:
                return rest.strategies(name, offer, candidates)
            return np.ones(len(candidates.choices), dtype=bool)

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            if self.rest is None and tensor.name not in used and not self.divided:
                return np.ones(len(layouts), dtype=bool)
            cut = used.get(tensor.name) or (1,) * len(tensor.shape)
            refinements = np.array([_refinement(layout, cut, mesh) for layout in layouts])
            if not (refinements > 0).any():
                raise NoAssignment
            return np.asarray(refinements == self._parts(refinements))

        return Limits(strategies=strategies, storage=storage)

    def _fits_batch(self, analysis: Analysis, mesh: Mesh) -> bool:
        """Whether a mesh has all devices of a stage, and splits micro-batches where it can."""
        if mesh.devices != self.devices:
            return False
        divides = self.batch % mesh.devices == 0
        return self.rest is None or not divides or batch_of(analysis.graph) % mesh.devices == 0

    def _parts(self, refinements: NDArray[np.int64]) -> int:
        """The parts into which a parameter's part of an operator is divided to be stored."""
        if not self.divided:
            return 1
        if self.parts is None:
            return int(refinements.max())
        return self.parts if self.parts in refinements else 1

    def _used(self, operator: Operator, tensor: str, name: str) -> tuple[int, ...]:
        index = operator.inputs.index(tensor)
        return self.cuts[name][index] if index < len(self.cuts[name]) else ()


def axes_needed(cuts: Sequence[Sequence[int]], devices: int) -> int:
    """The least number of mesh axes on which every operator's cuts lie on distinct axes.

    >>> axes_needed([[4, 1, 1], [1, 1, 4]], 4), axes_needed([[2, 4, 1], [8, 1, 1]], 8)
    (1, 2)
    >>> axes_needed([[2, 1]], 8)
    2
    """
    fitting = (
        len(sizes) for sizes in factorisations(devices) if all(_lies(cut, sizes) for cut in cuts)
    )
    return min(fitting, default=len(cuts) + 1)


def _lies(cuts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether each cut can be given axes with its number of parts.

    An axis is given to one cut, or to none.
    """
    owners = itertools.product(range(-1, len(cuts)), repeat=len(sizes))
    return any(
        all(
            math.prod(size for size, owner in zip(sizes, number, strict=True) if owner == f) == cut
            for f, cut in enumerate(cuts)
        )
        for number in owners
    )


def _refinement(layout: Layout, cut: Sequence[int], mesh: Mesh) -> int:
    """The ratio of a layout's parts of a parameter to those of its use.

    0 if it does not subdivide them.
    """
    degrees = _degrees(layout, mesh)
    if any(degrees.get(dim, 1) % count for dim, count in enumerate(cut)):
        return 0
    return math.prod(degrees.values()) // math.prod(cut)


def _degrees(layout: Layout, mesh: Mesh) -> dict[int, int]:
    """The number of parts into which a layout cuts each dim."""
    degrees: dict[int, int] = {}
    for placement, size in zip(layout, mesh.shape, strict=True):
        if placement.kind is Kind.SPLIT:
            degrees[placement.dim] = degrees.get(placement.dim, 1) * size
    return degrees


def _cut_so(candidates: Strategies, wanted: NDArray[np.int64], mesh: Mesh) -> Bools:
    """The strategies that cut every factor into the wanted contiguous parts and do nothing else."""
    plain = np.array([_is_plain(option) for option in candidates.options])
    cut_so = (candidates.degrees(mesh.shape) == wanted).all(axis=1)
    # On an axis of one device every option is the same.
    contiguous = (plain[candidates.choices] | (np.array(mesh.shape) == 1)).all(axis=1)
    allowed = cut_so & contiguous
    if not allowed.any():
        raise NoAssignment
    return np.asarray(allowed)


def _is_plain(option: Option) -> bool:
    return option.name in ("R", "B") or (
        option.factor >= 0 and option.parts == 1 and option.inner_parts == 1
    )
