"""Choices fixed before the search: a user's pins, and the part of a loaded plan that matches.

They only restrict the ordinary strategies; the search decides the rest. Named schemes are in
`schemes/`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.frameworks import DISPATCHERS
from autopar.errors import UsageError, unknown
from autopar.ir import Tensor
from autopar.plan import Plan
from autopar.search import NoAssignment
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.layout import Layout, parse_layout
from autopar.sharding.mesh import Mesh
from autopar.sharding.notation import ONCE
from autopar.sharding.strategies import Option, Strategies

from .restrictions import Limits

Bools = NDArray[np.bool_]
Restriction = Callable[[Analysis, Mesh], Limits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Restrictions of single operators and parameters.

    `operators`: name or glob pattern of operators, or of regions, of which it means the leads →
    axis name → option. `storage`: parameter or pattern → layout.
    """

    operators: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    storage: Mapping[str, Layout] = field(default_factory=dict)

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """Return the limits on this mesh.

        Raises `UsageError` for a pattern without matches, and for an unknown axis or factor.
        """
        # Mistakes in pins are reported before anything is searched.
        self._check(analysis, mesh)

        leads = {region.lead: region.name for region in analysis.regions}

        def strategies(name: str, offer: Offer, offered: Strategies) -> Bools:
            allowed = np.ones(len(offered.choices), dtype=bool)
            for pattern, wanted in self.operators.items():
                if _means(pattern, name) or _means(pattern, leads.get(name, name)):
                    # Axes that are not named stay free.
                    for axis, option in wanted.items():
                        index = _option_index(name, option, offer.options)
                        allowed &= offered.choices[:, mesh.index(axis)] == index
            return allowed

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            wanted = [
                layout
                for pattern, layout in self.storage.items()
                if fnmatch.fnmatchcase(tensor.name, pattern)
            ]
            # Two patterns that want different layouts leave none, which ends in an error.
            return np.array([all(layout == w for w in wanted) for layout in layouts])

        return Limits(strategies=strategies, storage=storage if self.storage else None)

    def _check(self, analysis: Analysis, mesh: Mesh) -> None:
        names = [op.name for op in analysis.warm]
        names += [region.name for region in analysis.regions if region.name not in names]
        for pattern, wanted in self.operators.items():
            if not any(_means(pattern, name) for name in names):
                # A misspelt pin that restricted nothing would look obeyed.
                near = difflib.get_close_matches(
                    pattern.strip("/"), [name.strip("/") for name in names], n=5, cutoff=0.3
                )
                hint = f"nearest are {', '.join(near)}" if near else "none is alike"
                raise UsageError(
                    f"unknown operator to pin {pattern!r}: {hint} "
                    "(a pattern such as '*attn*' works too)"
                )
            for axis in wanted:
                mesh.index(axis)
        for pattern in self.storage:
            if not fnmatch.filter([t.name for t in analysis.graph.parameters], pattern):
                raise UsageError(
                    unknown(
                        "parameter to pin",
                        pattern,
                        [t.name for t in analysis.graph.parameters][:50],
                    )
                )


def _means(pattern: str, name: str) -> bool:
    """Whether a pin matches an operator, by pattern or by name.

    The leading slash of ONNX names may be left out.

    >>> _means("h.3/fc/MatMul", "/h.3/fc/MatMul"), _means("h.*/MatMul", "/h.3/fc/MatMul")
    (True, True)
    >>> _means("h.3", "/h.3/fc/MatMul")
    False
    """
    short = pattern.strip("/")
    bare = name.strip("/")
    return short == bare or fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(bare, short)


def _option_index(operator: str, name: str, options: Sequence[Option]) -> int:
    for index, option in enumerate(options):
        if option.name == name:
            return index
    raise UsageError(
        f"operator {operator!r}: " + unknown("factor", name, [option.name for option in options])
    )


def replicated(analysis: Analysis, mesh: Mesh) -> Limits:
    """Return limits that let the graph's `replicated` kinds run redundantly on every axis."""

    def strategies(name: str, offer: Offer, offered: Strategies) -> Bools:
        # Nothing is known of the rules of such kinds, so every device computes all of it.
        if offer.call.operator.kind not in analysis.graph.replicated:
            return np.ones(len(offered.choices), dtype=bool)
        return np.asarray((offered.choices == _option_index(name, "R", offer.options)).all(axis=1))

    return Limits(strategies=strategies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Limits that let rows come to experts in one way alone, of `DISPATCHERS`."""

    dispatcher: str

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """Return the limits on any mesh."""
        return Limits(strategies=self._allowed)

    def _allowed(self, name: str, offer: Offer, offered: Strategies) -> Bools:
        ways = [offer.way_of_rows(option) for option in offer.options]
        wanted = DISPATCHERS[self.dispatcher]
        # A token with one expert goes there once, whatever is sent.
        if wanted == ONCE and ONCE not in ways:
            wanted = DISPATCHERS["alltoall"]
        allowed = np.array([way in ("", wanted) for way in ways])
        return np.asarray(allowed[offered.choices].all(axis=1))


def parse_pin(text: str) -> tuple[str, dict[str, str]]:
    """Read `OP=AXIS:FACTOR,AXIS:FACTOR`.

    >>> parse_pin("h.0/*=gpu:n,node:d0")
    ('h.0/*', {'gpu': 'n', 'node': 'd0'})
    """
    name, equals, rest = text.rpartition("=")
    pairs = [part.partition(":") for part in rest.split(",")]
    if (
        not equals
        or not name
        or any(not colon or not axis or not factor for axis, colon, factor in pairs)
    ):
        raise UsageError(f"pin {text!r} is not of the form OP=AXIS:FACTOR,...")
    return name, {axis: factor for axis, _, factor in pairs}


def reuse(plan: Plan, analysis: Analysis) -> tuple[Pins, int]:
    """Return pins for all of a plan that is unchanged in the model, and the number of operators."""
    # Names may stay while an operator changes; of ONNX's kinds, once used, there is the name alone.
    prints = {op.name: analysis.graph.operator_fingerprint(op) for op in analysis.warm}
    axes = [axis.name for axis in plan.mesh]
    operators = {
        _escape(name): dict(zip(axes, op.strategy, strict=True))
        for name, op in plan.operators.items()
        if (prints.get(name) == op.fingerprint or ("onnx." in op.kind and name in prints))
        and {*op.strategy} <= {option.name for option in analysis.offers[name].options}
    }
    tensors = {tensor.name: tensor for tensor in analysis.graph.parameters}
    storage = {
        _escape(name): parse_layout(p.storage)
        for name, p in plan.parameters.items()
        if name in tensors and (tensors[name].shape, tensors[name].dtype) == (p.shape, p.dtype)
    }
    return Pins(operators=operators, storage=storage), len(operators)


def hosted_by(plan: Plan) -> frozenset[str] | None:
    """Return the parameters whose optimizer state a plan has in host memory.

    Returns None if there are none, so that nothing is pinned.
    """
    return (
        frozenset(name for name, parameter in plan.parameters.items() if parameter.state == "host")
        or None
    )


def _escape(name: str) -> str:
    """The pattern that matches only this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _some(allowed: Bools) -> Bools:
    """The mask, or `NoAssignment` if it allows nothing."""
    if not allowed.any():
        raise NoAssignment
    return allowed


def together(*restrictions: Restriction) -> Restriction:
    """All restrictions at once."""
    return _Together(restrictions=restrictions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """Several restrictions that all hold."""

    restrictions: tuple[Restriction, ...]

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        parts = [restriction(analysis, mesh) for restriction in self.restrictions]

        def strategies(name: str, offer: Offer, offered: Strategies) -> Bools:
            allowed = np.ones(len(offered.choices), dtype=bool)
            for part in parts:
                if part.strategies is not None:
                    allowed &= part.strategies(name, offer, offered)
            return _some(allowed)

        def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
            allowed = np.ones(len(layouts), dtype=bool)
            for part in parts:
                if part.storage is not None:
                    allowed &= part.storage(tensor, layouts)
            return _some(allowed)

        outputs = {name: layout for part in parts for name, layout in part.outputs.items()}
        return Limits(strategies=strategies, storage=storage, outputs=outputs)
