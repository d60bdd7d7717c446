"""What is fixed before the search: user pins, a loaded plan's matching part, and schemes known by name.

All of them only restrict the ordinary strategies; the search completes the rest.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.search import NoAssignment

from .errors import UsageError, unknown
from .ir import Role, Tensor
from .plan import Plan
from .sharding.analysis import Analysis, Offer
from .sharding.candidates import Option, Strategies
from .sharding.classes import FactorClass
from .sharding.layout import Kind, Layout, parse_layout
from .sharding.mesh import Mesh
from .sharding.rules import RULES
from .tables import Limits

Bools = NDArray[np.bool_]
Restriction = Callable[[Analysis, Mesh], Limits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """`operators`: name or glob pattern → axis name → option; `storage`: parameter or pattern → layout."""

    operators: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    storage: Mapping[str, Layout] = field(default_factory=dict)

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits on this mesh; a pattern that names nothing, an unknown axis or factor is an error."""
        self._check(analysis, mesh)

        def strategies(name: str, offer: Offer, found: Strategies) -> Bools:
            allowed = np.ones(len(found.choices), dtype=bool)
            for pattern, wanted in self.operators.items():
                if name == pattern or fnmatch.fnmatchcase(name, pattern):
                    for axis, option in wanted.items():
                        index = _option_index(name, option, offer.options)
                        allowed &= found.choices[:, mesh.index(axis)] == index
            return allowed

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            wanted = [layout for pattern, layout in self.storage.items() if fnmatch.fnmatchcase(tensor.name, pattern)]
            return np.array([all(layout == w for w in wanted) for layout in layouts])

        return Limits(strategies=strategies, storage=storage if self.storage else None)

    def _check(self, analysis: Analysis, mesh: Mesh) -> None:
        names = [op.name for op in analysis.warm]
        for pattern, wanted in self.operators.items():
            if not any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in names):
                raise UsageError(unknown("operator to pin", pattern, names[:50]))
            for axis in wanted:
                mesh.index(axis)
        for pattern in self.storage:
            if not fnmatch.filter([t.name for t in analysis.graph.parameters], pattern):
                raise UsageError(unknown("parameter to pin", pattern, [t.name for t in analysis.graph.parameters][:50]))


def _option_index(operator: str, name: str, options: Sequence[Option]) -> int:
    for index, option in enumerate(options):
        if option.name == name:
            return index
    raise UsageError(f"operator {operator!r}: " + unknown("factor", name, [option.name for option in options]))


def replicated(analysis: Analysis, mesh: Mesh) -> Limits:
    """Operators that the graph names as replicated are computed redundantly on every axis."""

    def strategies(name: str, offer: Offer, found: Strategies) -> Bools:
        if offer.call.operator.kind not in analysis.graph.replicated:
            return np.ones(len(found.choices), dtype=bool)
        return np.asarray((found.choices == _option_index(name, "R", offer.options)).all(axis=1))

    return Limits(strategies=strategies)


def parse_pin(text: str) -> tuple[str, dict[str, str]]:
    """Read `OP=AXIS:FACTOR,AXIS:FACTOR`.

    >>> parse_pin("h.0/*=gpu:n,node:d0")
    ('h.0/*', {'gpu': 'n', 'node': 'd0'})
    """
    name, equals, rest = text.rpartition("=")
    pairs = [part.partition(":") for part in rest.split(",")]
    if not equals or not name or any(not colon or not axis or not factor for axis, colon, factor in pairs):
        raise UsageError(f"pin {text!r} is not of the form OP=AXIS:FACTOR,...")
    return name, {axis: factor for axis, _, factor in pairs}


def reuse(plan: Plan, analysis: Analysis) -> tuple[Pins, int]:
    """Pins for every operator and parameter of a plan that the model still holds unchanged, and how many they are."""
    prints = {op.name: analysis.graph.operator_fingerprint(op) for op in analysis.warm}
    axes = [axis.name for axis in plan.mesh]
    operators = {
        _escape(name): dict(zip(axes, op.strategy, strict=True))
        for name, op in plan.operators.items()
        if prints.get(name) == op.fingerprint and {*op.strategy} <= {option.name for option in analysis.offers[name].options}
    }
    tensors = {tensor.name: tensor for tensor in analysis.graph.parameters}
    storage = {
        _escape(name): parse_layout(p.storage)
        for name, p in plan.parameters.items()
        if name in tensors and (tensors[name].shape, tensors[name].dtype) == (p.shape, p.dtype)
    }
    return Pins(operators=operators, storage=storage), len(operators)


def _escape(name: str) -> str:
    """A pattern that matches this very name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


# --- schemes known by name: which options of an operator, and which storage, they leave ---

OptionFilter = Callable[[bool, Option, FactorClass | None], bool]
"""Whether a scheme allows an option: given whether the operator holds a weight matrix, and what the split factor runs over."""


def _rows_only(matrix: bool, option: Option, over: FactorClass | None) -> bool:
    """Data parallel: only batch (or sequence) is split, never a dim of a weight."""
    return over in (FactorClass.ROW, None) and option.name != "P"


def _inner_only(matrix: bool, option: Option, over: FactorClass | None) -> bool:
    """Megatron: heads, feed-forward and vocabulary are split; activations between are whole."""
    return over is FactorClass.INNER or (over is None and not matrix)


def _inner_and_sequence(matrix: bool, option: Option, over: FactorClass | None) -> bool:
    """Megatron with sequence parallelism: matrices as above, and rows are split in between."""
    return over is FactorClass.INNER if matrix else over is not FactorClass.HIDDEN and option.name not in ("R", "P")


def _weights(matrix: bool, option: Option, over: FactorClass | None) -> bool:
    """Tensor parallel of any kind: weight matrices are split, the rest is free."""
    return not matrix or over in (FactorClass.INNER, FactorClass.HIDDEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A known scheme: the options it allows, and how parameters are stored ("whole", "split", or "free")."""

    options: OptionFilter
    storage: str

    def good(self, name: str, offer: Offer, analysis: Analysis) -> tuple[Bools, Bools]:
        """Which options of an operator the scheme allows, and which of them split a factor."""
        matrix, classes = _has_matrix(offer), analysis.classes[name]
        good = np.array([self.options(matrix, o, classes[o.factor] if o.factor >= 0 else None) for o in offer.options])
        return good, np.array([option.factor >= 0 for option in offer.options])

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits of the scheme; an operator of which it would leave nothing (on some axis) is free."""

        def strategies(name: str, offer: Offer, found: Strategies) -> Bools:
            good, splits = self.good(name, offer, analysis)
            allowed: Bools = np.asarray(good[found.choices].all(axis=1))
            if self.options is _rows_only and (allowed & splits[found.choices].all(axis=1)).any():
                allowed &= splits[found.choices].all(axis=1)
            return allowed if allowed.any() else np.ones(len(found.choices), dtype=bool)

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            splits = np.array([sum(p.kind is Kind.SPLIT for p in layout) for layout in layouts])
            wanted: Bools = splits == (splits.max() if self.storage == "split" else 0)
            return wanted

        return Limits(strategies=strategies, storage=None if self.storage == "free" else storage)


def _has_matrix(offer: Offer) -> bool:
    return bool(RULES[offer.call.operator.kind].products) and any(t.role is Role.PARAMETER and len(t.shape) > 1 for t in offer.call.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSchemes:
    """A scheme for each named axis of the mesh: data parallel on one and tensor parallel on another, say."""

    by_axis: Mapping[str, Scheme]

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits, axis by axis; an operator of which a scheme would leave nothing on its axis is free there."""
        chosen = [(mesh.index(axis), scheme) for axis, scheme in self.by_axis.items()]

        def strategies(name: str, offer: Offer, found: Strategies) -> Bools:
            allowed = np.ones(len(found.choices), dtype=bool)
            for axis, scheme in chosen:
                good, splits = scheme.good(name, offer, analysis)
                here = good[found.choices[:, axis]]
                if scheme.options is _rows_only and (allowed & here & splits[found.choices[:, axis]]).any():
                    here &= splits[found.choices[:, axis]]
                if (allowed & here).any():
                    allowed &= here
            return allowed

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            wanted = np.ones(len(layouts), dtype=bool)
            for axis, scheme in chosen:
                split = np.array([layout[axis].kind is Kind.SPLIT for layout in layouts])
                if scheme.storage == "whole" or (scheme.storage == "split" and (wanted & split).any()):
                    wanted &= split == (scheme.storage == "split")
            return wanted

        return Limits(strategies=strategies, storage=storage)


SCHEMES: Mapping[str, Scheme] = {
    "data": Scheme(options=_rows_only, storage="whole"),
    "zero3": Scheme(options=_rows_only, storage="split"),
    "tensor": Scheme(options=_weights, storage="free"),
    "megatron": Scheme(options=_inner_only, storage="free"),
    "megatron-sp": Scheme(options=_inner_and_sequence, storage="free"),
}


def scheme_named(name: str) -> Scheme | AxisSchemes:
    """The scheme called `name`, or one for each axis ("node:data,rank:megatron"); an unknown name is an error that lists the valid ones."""
    if ":" in name:
        pairs = [part.partition(":") for part in name.split(",")]
        if any(not axis or not colon for axis, colon, _ in pairs):
            raise UsageError(f"scheme {name!r} is not of the form NAME or AXIS:NAME,...")
        return AxisSchemes(by_axis={axis: _scheme(scheme) for axis, _, scheme in pairs})
    return _scheme(name)


def _scheme(name: str) -> Scheme:
    if name not in SCHEMES:
        raise UsageError(unknown("scheme", name, SCHEMES))
    return SCHEMES[name]


def _some(allowed: Bools) -> Bools:
    """The mask, where it leaves anything to choose."""
    if not allowed.any():
        raise NoAssignment
    return allowed


def together(*restrictions: Restriction) -> Restriction:
    """All restrictions at once."""

    def combined(analysis: Analysis, mesh: Mesh) -> Limits:
        parts = [restriction(analysis, mesh) for restriction in restrictions]

        def strategies(name: str, offer: Offer, found: Strategies) -> Bools:
            allowed = np.ones(len(found.choices), dtype=bool)
            for part in parts:
                if part.strategies is not None:
                    allowed &= part.strategies(name, offer, found)
            return _some(allowed)

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            allowed = np.ones(len(layouts), dtype=bool)
            for part in parts:
                if part.storage is not None:
                    allowed &= part.storage(tensor, layouts)
            return _some(allowed)

        outputs = {name: layout for part in parts for name, layout in part.outputs.items()}
        return Limits(strategies=strategies, storage=storage, outputs=outputs)

    return combined
