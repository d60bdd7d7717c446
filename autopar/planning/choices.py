"""What each variable of the tables chooses among, with the seconds and the bytes of each choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.memory.saved_values import Kept, kept_values
from autopar.costmodel.step.casts import cast_seconds
from autopar.costmodel.step.layout_space import LayoutSpace
from autopar.costmodel.step.pricing import storage_bytes, update_seconds

from ..ir import Operator, Tensor
from ..sharding.analysis import Offer
from ..sharding.candidates import Strategies, is_storable, strategies_of
from ..sharding.layout import Kind, Placement, R
from ..sharding.rules import RULES
from .limits import Limits
from .parameter_handling import home_seconds
from .tables import Basis, Floats, Ints

THRIFTY_AXES = 3
"""Meshes of as many axes leave out matrix products that some axis repeats, unless all do: the meshes of fewer axes hold those plans."""

@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Arrays [choices] of a variable: `rows` as of `Variable`; seconds; bytes; `digits` [choices, axes], a kind or option for each axis."""

    rows: Ints
    seconds: Floats
    memory: Floats
    digits: Ints

    def where(self, allowed: NDArray[np.bool_]) -> Choices:
        """Those that are allowed."""
        return Choices(rows=self.rows[allowed], seconds=self.seconds[allowed], memory=self.memory[allowed], digits=self.digits[allowed])


class Choosing:
    """The choices of variables within the limits; those of equal operators and tensors are one value."""

    def __init__(self, basis: Basis, limits: Limits) -> None:
        self.basis, self.limits, self.work, self.known = basis, limits, basis.work, basis.known
        self.kept = values_kept(basis)

    # --- parameters ---

    def parameter(self, tensor: Tensor) -> Choices:
        """The layouts in which it may be stored."""
        basis, space = self.basis, self.basis.spaces[tensor.name]
        kept = tensor.name in self.kept.weights and self.work.zero < 3
        count = self.work.counts.tensors.get(tensor.name, 1)
        # Operators that keep it count the weight as they use it: the stored shard itself, or a gathered (or cast) copy beside it.
        counted = kept and not basis.types.casts(tensor)
        trained = tensor.name in basis.analysis.gradients
        often = (count, self.work.once, self.work.covers)
        key = ("parameter", id(space), tensor.shape, tensor.bytes, tensor.trainable, trained, counted, often)
        lasting = self.known.of_parameters or self.known
        found = lasting.once(key, lambda: self._stored(tensor, space, count, counted=counted))
        if self.limits.storage is None:
            return found
        allowed = self.limits.storage(tensor, tuple(space.layout(int(code)) for code in found.rows))
        return self._masked(key, allowed, found)

    def _stored(self, tensor: Tensor, space: LayoutSpace, count: int, *, counted: bool) -> Choices:
        basis, digits, train = self.basis, space.digits(), self.basis.analysis.train
        splits = tuple(i for i, kind in enumerate(space.kinds) if kind == R or kind.kind is Kind.SPLIT)
        rows = self._storable(space, np.nonzero(space.valid(tensor.shape) & _all_among(space, splits))[0])
        shards = space.divisors()[rows]
        seconds = self._stored_seconds(tensor, shards) if train else np.zeros(len(rows))
        memory = storage_bytes(tensor, shards, basis.optimizer, train=train, types=basis.types)
        memory = memory - tensor.bytes / shards if counted else memory
        return Choices(rows=rows, seconds=count * self.work.once * seconds, memory=count * memory, digits=digits[rows])

    def _stored_seconds(self, tensor: Tensor, shards: Ints) -> Floats:
        """Seconds of the update of a stored parameter, of its cast, and of that of its gradients' sum."""
        basis, cluster = self.basis, self.basis.prices.cluster
        update = update_seconds(tensor, shards, basis.optimizer, cluster, basis.types)
        casts = cast_seconds(tensor, shards, cluster, basis.types)
        if tensor.name in basis.analysis.gradients:
            casts = casts + home_seconds(tensor, shards, basis.types, cluster.device)
        return update + (1 - self.work.covers) * casts

    def _storable(self, space: LayoutSpace, codes: Ints) -> Ints:
        """Those of the layouts that a DTensor can have."""
        return codes[[is_storable(space.layout(int(code)), self.basis.mesh) for code in codes]]

    def _masked(self, key: object, allowed: NDArray[np.bool_], found: Choices) -> Choices:
        return self.known.once((key, allowed.tobytes()), lambda: found.where(allowed))

    # --- operators ---

    def operator(self, op: Operator) -> tuple[Strategies, Ints]:
        """All its strategies, and the numbers of those that may be chosen; of equal operators the same objects."""
        offer = self.basis.analysis.offers[op.name]
        strategies = self.known.once(("strategies", id(offer)), lambda: self._strategies(offer))
        count = len(strategies.choices)
        rows = self.known.once(("rows", count), lambda: np.arange(count))
        if self.limits.strategies is None:
            return strategies, rows
        allowed = self.limits.strategies(op.name, offer, strategies)
        return strategies, self.known.once(("rows", count, allowed.tobytes()), lambda: rows[allowed])

    def _strategies(self, offer: Offer) -> Strategies:
        """All strategies; on a large mesh, unless something is pinned, a matrix product splits every axis if it can, or is computed on
        every device alike."""
        mesh = self.basis.mesh
        found = strategies_of(offer.rule, offer.options, mesh)
        if len(mesh) < THRIFTY_AXES or self.limits.strategies is not None or not RULES[offer.call.operator.kind].products:
            return found
        splits = np.array([option.factor >= 0 for option in offer.options])[found.choices].all(axis=1)
        alike = (found.choices == found.choices[:, :1]).all(axis=1)
        return replace(found, choices=np.ascontiguousarray(found.choices[splits | alike])) if splits.any() else found

    # --- fan-outs and outputs ---

    def fan_out(self, name: str, codes: Ints, kinds: Sequence[int]) -> Choices:
        """The layouts to which a value that is made in those of `codes` may be brought for readers that take it in these kinds."""
        space, tensor = self.basis.spaces[name], self.basis.graph.tensors[name]
        key = ("fan-out", id(space), tensor.shape, self.known.content(codes), tuple(kinds))

        def make() -> Choices:
            wanted = space.valid(tensor.shape) & (np.bincount(kinds, minlength=len(space.kinds)) > 0)[space.digits()].all(axis=1)
            wanted[codes] = True
            return _free(space, np.nonzero(wanted)[0])

        return self.known.once(key, make)

    def output(self, name: str) -> Choices:
        """The layouts in which a value may leave; what is added up or handed on to the next step leaves whole."""
        graph, limits = self.basis.graph, self.limits
        space, tensor = self.basis.spaces[name], graph.tensors[name]
        pinned = R if name in (graph.loss, *graph.updates.values()) else None
        splits = tuple(i for i, kind in enumerate(space.kinds) if kind == R or (kind.kind is Kind.SPLIT and pinned is None))
        key = ("output", id(space), tensor.shape, splits, limits.outputs.get(name))

        def make() -> Choices:
            if name in limits.outputs:
                return _free(space, np.array([space.code(limits.outputs[name])]))
            valid = space.valid(tensor.shape) & _all_among(space, splits)
            return _free(space, self._storable(space, np.nonzero(valid)[0]))

        return self.known.once(key, make)


def values_kept(basis: Basis) -> Kept:
    """What every operator keeps for its backward pass, with the recomputed segments."""
    segments = basis.work.segments
    return basis.known.once(("kept values", segments), lambda: kept_values(basis.analysis, segments))


def _all_among(space: LayoutSpace, kinds: Sequence[int]) -> NDArray[np.bool_]:
    """Which layouts have one of these kinds on every axis."""
    among = np.zeros(len(space.kinds), dtype=bool)
    among[list(kinds)] = True
    return np.asarray(among[space.digits()].all(axis=1))


def _free(space: LayoutSpace, rows: Ints) -> Choices:
    """Layouts that cost nothing by themselves."""
    zero = np.zeros(len(rows))
    return Choices(rows=rows, seconds=zero, memory=zero, digits=space.digits()[rows])


def kinds_read(basis: Basis, name: str, readers: Iterable[tuple[int, int]]) -> list[int]:
    """The kinds, by their numbers in the tensor's space, in which its readers may take it."""
    space: LayoutSpace = basis.spaces[name]
    found: set[Placement] = set()
    for operator, position in readers:
        if operator >= 0:
            op = basis.graph.operators[operator]
            found |= {option.inputs[position] for option in basis.analysis.offers[op.name].options}
    return sorted(space.kinds.index(kind) for kind in found)


def codes_of(basis: Basis, op: Operator, strategies: Strategies, rows: Ints, position: int, *, output: bool) -> Ints:
    """Layout codes of one tensor of an operator, for the strategies in `rows`."""
    known, space = basis.known, basis.spaces[op.outputs[position] if output else op.inputs[position]]

    def make() -> Ints:
        kinds: Mapping[Placement, int] = known.once(("kinds", id(space)), lambda: {kind: n for n, kind in enumerate(space.kinds)})
        lut = np.array([kinds[(o.outputs if output else o.inputs)[position]] for o in strategies.options])
        codes = space.codes(lut[strategies.choices[rows]])
        known.keep.append(codes)
        return codes

    known.keep.append(rows)
    return known.once(("codes", id(strategies), id(rows), position, output, id(space)), make)
