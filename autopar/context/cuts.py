"""Cuts of operators as restrictions of the search: cut operators have these cuts, other operators follow the mode.

A cut of a dim is a cut of its factor (the outer one of several), and a factor is cut alike in all inputs. On mesh axes
that no cut needs, an operator keeps copies. The search finds a mesh with room for the cuts, and their axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..ir import Graph, Operator, Tensor
from ..model import LoadedModel
from ..order.part_gathers import batch_of
from ..planning.limits import Limits
from ..schemes.axis import axis_limits
from ..schemes.axis_schemes import AXIS_SCHEMES
from ..schemes.splits import profiles_of
from ..search import NoAssignment
from ..sharding.analysis import Analysis, Offer
from ..sharding.candidates import Option, Strategies
from ..sharding.layout import Kind, Layout
from ..sharding.mesh import Mesh, factorisations
from ..sharding.rules import RULES
from .marks import CUTS, Cuts, marked

Bools = NDArray[np.bool_]


def cuts_of(model: LoadedModel) -> dict[str, Cuts]:
    """The cut operators of a model, by name, as its modules are marked."""
    found = {}
    for path, cuts in marked(model.given, CUTS):
        operator = _operator_of(model.graph, path, cuts)
        found[operator.name] = cuts
    return found


def _operator_of(graph: Graph, path: str, cuts: Cuts) -> Operator:
    """The one operator of the module at `path` that takes such inputs."""
    inside = [op for op in graph.operators if not path or op.name.startswith((f"{path}/", f"{path}."))]
    fitting = [op for op in inside if _fits(graph, op, cuts)]
    heavy = [op for op in fitting if op.kind in RULES and RULES[op.kind].products]
    found = heavy or fitting
    if len(found) == 1:
        return found[0]
    shapes = ", ".join(f"{op.name} ({_shapes(graph, op)})" for op in (found or inside)[:5]) or "none"
    many = "several operators take" if found else "no operator takes"
    dims = ", ".join(str(len(one)) for one in cuts)
    raise UsageError(f"shard of {path or 'the model'!r}: {many} inputs of {dims} dims; its operators: {shapes}")


def _fits(graph: Graph, operator: Operator, cuts: Cuts) -> bool:
    shapes = [graph.tensors[name].shape for name in operator.inputs]
    return len(shapes) >= len(cuts) and all(len(s) == len(c) for s, c in zip(shapes, cuts, strict=False))


def _shapes(graph: Graph, operator: Operator) -> str:
    return ", ".join("x".join(map(str, graph.tensors[name].shape)) or "()" for name in operator.inputs)


def wanted_degrees(name: str, offer: Offer, cuts: Cuts, devices: int) -> NDArray[np.int64]:
    """The number of parts of each factor of an operator; `UsageError` with the reason if the cuts do not fit."""
    rule = offer.rule
    found: dict[int, int] = {}
    for index, (dims, one) in enumerate(zip(rule.inputs, cuts, strict=False)):
        tensor = offer.call.inputs[index]
        for dim, (factors, count) in enumerate(zip(dims, one, strict=True)):
            if tensor.shape[dim] % count:
                size = tensor.shape[dim]
                raise UsageError(f"shard of {name!r}: dim {dim} of input {index} has size {size}, which {count} does not divide")
            for factor in factors:
                share = math.gcd(count, rule.factors[factor].size)
                count //= share
                before = found.setdefault(factor, share)
                if before != share:
                    other = f"{rule.factors[factor].name} is cut into {before} parts in one input and into {share} in another"
                    raise UsageError(f"shard of {name!r}: {other}; it is the same loop, cut it alike")
                if share > 1 and rule.factors[factor].whole:
                    raise UsageError(f"shard of {name!r}: dim {dim} of input {index} must be whole; {_divisible(offer)}")
            if count > 1:
                raise UsageError(f"shard of {name!r}: dim {dim} of input {index} cannot be cut so; {_divisible(offer)}")
    parts = math.prod(found.values())
    if devices % parts:
        near = " and ".join(map(str, _divisors_beside(parts, devices)))
        why = f"its cuts make {parts} parts, which do not divide the {devices} devices of a stage; {near} would"
        raise UsageError(f"shard of {name!r}: {why}")
    return np.array([found.get(factor, 1) for factor in range(len(rule.factors))], dtype=np.int64)


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

    `cuts`: by operator. `stored`: the parts of parameters that no cut operator reads. `devices`: of a stage. `rest`:
    the axis scheme of all other operators, or None where they are free; if the devices then divide the global `batch`,
    they must divide every micro-batch too. A parameter that a cut operator reads is stored in its used layout; any
    other is stored whole if the other operators have a scheme. With `divided`, every parameter is stored in `parts`
    times as many parts where that is possible (None: as many as there can be).
    """

    cuts: Mapping[str, Cuts]
    devices: int
    batch: int = 0
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rest: str | None = None
    divided: bool = False
    parts: int | None = None

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits on a mesh; `NoAssignment` where it has no room for a cut, or is none of all devices of a stage."""
        undivided = self.batch % mesh.devices == 0 < batch_of(analysis.graph) % mesh.devices
        if mesh.devices != self.devices or (self.rest is not None and undivided):
            raise NoAssignment
        by_name = {op.name: op for op in analysis.warm}
        wanted = {
            name: wanted_degrees(name, analysis.offers[name], cuts, mesh.devices) for name, cuts in self.cuts.items() if name in by_name
        }
        if (
            self.rest is not None
            and wanted
            and len(mesh.axes) > axes_needed([list(map(int, one)) for one in wanted.values()], mesh.devices)
        ):
            raise NoAssignment
        schemes = (AXIS_SCHEMES[self.rest],) * len(mesh.axes) if self.rest else ()
        others = axis_limits(schemes, analysis, profiles_of(analysis), mesh) if schemes else Limits()
        used = {name: self._used(by_name[op], name, op) for op in wanted for name in by_name[op].inputs} | dict(self.stored)

        def strategies(name: str, offer: Offer, found: Strategies) -> Bools:
            if name in wanted:
                return _cut_so(found, wanted[name], mesh)
            return others.strategies(name, offer, found) if others.strategies else np.ones(len(found.choices), dtype=bool)

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            known = self.rest is not None or tensor.name in used
            if not known and not self.divided:
                return np.ones(len(layouts), dtype=bool)
            cut = used.get(tensor.name) or (1,) * len(tensor.shape)
            found = np.array([_more(layout, cut, mesh) for layout in layouts])
            if not (found > 0).any():
                raise NoAssignment
            wanted = 1 if not self.divided else self.parts if self.parts in found else int(found.max()) if self.parts is None else 1
            return np.asarray(found == wanted)

        return Limits(strategies=strategies, storage=storage)

    def _used(self, operator: Operator, tensor: str, name: str) -> tuple[int, ...]:
        index = operator.inputs.index(tensor)
        return self.cuts[name][index] if index < len(self.cuts[name]) else ()


def axes_needed(cuts: Sequence[Sequence[int]], devices: int) -> int:
    """The least number of mesh axes that hold all these cuts, with each operator's cuts on distinct axes.

    >>> axes_needed([[4, 1, 1], [1, 1, 4]], 4), axes_needed([[2, 4, 1], [8, 1, 1]], 8), axes_needed([[2, 1]], 8)
    (1, 2, 2)
    """
    fitting = (len(sizes) for sizes in factorisations(devices) if all(_lies(one, sizes) for one in cuts))
    return min(fitting, default=len(cuts) + 1)


def _lies(cuts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether every axis can be given to one of the cuts, or to none, so that each has its number of parts."""
    owners = itertools.product(range(-1, len(cuts)), repeat=len(sizes))
    return any(
        all(math.prod(size for size, owner in zip(sizes, found, strict=True) if owner == f) == cut for f, cut in enumerate(cuts))
        for found in owners
    )


def _more(layout: Layout, cut: Sequence[int], mesh: Mesh) -> int:
    """The ratio of a layout's parts of a parameter to those of its use; 0 if it does not subdivide them."""
    degrees = _degrees(layout, mesh)
    if any(degrees.get(dim, 1) % count for dim, count in enumerate(cut)):
        return 0
    return math.prod(degrees.values()) // math.prod(cut)


def _degrees(layout: Layout, mesh: Mesh) -> dict[int, int]:
    """The number of parts into which a layout cuts each dim."""
    found: dict[int, int] = {}
    for placement, size in zip(layout, mesh.shape, strict=True):
        if placement.kind is Kind.SPLIT:
            found[placement.dim] = found.get(placement.dim, 1) * size
    return found


def _cut_so(found: Strategies, wanted: NDArray[np.int64], mesh: Mesh) -> Bools:
    """The strategies that cut every factor into the wanted number of contiguous parts and do nothing else."""
    plain = np.array([_is_plain(option) for option in found.options])
    allowed = (found.degrees(mesh.shape) == wanted).all(axis=1) & (plain[found.choices] | (np.array(mesh.shape) == 1)).all(axis=1)
    if not allowed.any():
        raise NoAssignment
    return np.asarray(allowed)


def _is_plain(option: Option) -> bool:
    return option.name in ("R", "B") or (option.factor >= 0 and option.parts == 1 and option.inner_parts == 1)
