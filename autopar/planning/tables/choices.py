"""The choices of every variable of the tables, with the seconds and the bytes of each choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.memory.saved_values import SavedValues, saved_values
from autopar.costmodel.redistribution.layout_space import LayoutSpace
from autopar.costmodel.step.casts import cast_seconds
from autopar.costmodel.step.matrix_updates import share_of
from autopar.costmodel.step.mesh_prices import optimizer_of, storage_bytes, update_seconds
from autopar.ir import Operator, Tensor
from autopar.planning.model.restrictions import Limits
from autopar.search import NoAssignment
from autopar.sharding.analysis import Offer
from autopar.sharding.candidates import cuts_no_byte, is_storable, strategies_of
from autopar.sharding.layout import Kind, Placement, R
from autopar.sharding.regions import Joint, Region, joint_strategies
from autopar.sharding.rules import RULES
from autopar.sharding.strategies import Strategies

from .parameters.handling import home_seconds
from .tables import Basis, Choices, Codes, Floats, Ints

THRIFTY_AXES = 3
"""The number of axes from which on a matrix product is no longer repeated on single axes.

Meshes of fewer axes hold the plans that are left out.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allowed:
    """The strategies of an operator, and the numbers of those that may be chosen (`rows`).

    Operators with equal ones share one object, which is compared as such. The members of a region
    have equal rows.
    """

    strategies: Strategies
    rows: Ints


class Choosing:
    """Finds the choices of variables within the limits.

    Equal operators and tensors get the same objects, so that the search recognises equal layers.
    """

    def __init__(self, basis: Basis, limits: Limits) -> None:
        self.basis = basis
        self.limits = limits
        self.work = basis.work
        self.known = basis.known
        self.saved = saved_by_operators(basis)

    # --- parameters ---

    def parameter(self, tensor: Tensor) -> Choices:
        """Return the layouts in which a parameter may be stored."""
        basis = self.basis
        space = basis.spaces[tensor.name]
        count = self.work.counts.tensors.get(tensor.name, 1)
        # Operators that save a weight count it as they use it. That is the stored shard itself, or
        # a gathered (or cast) copy beside it.
        is_saved = tensor.name in self.saved.weights and self.work.zero < 3
        counted = is_saved and not basis.types.casts(tensor)
        trained = tensor.name in basis.analysis.gradients
        often = (count, self.work.once, self.work.covers)
        key = (
            "parameter",
            space,
            tensor.shape,
            tensor.bytes,
            tensor.trainable,
            trained,
            counted,
            often,
            tensor.name in basis.analysis.matrices,
        )
        every = self.known.on_mesh.once(
            key, lambda: self._stored(tensor, space, count, counted=counted)
        )
        choices = self.known.once((key, "runs"), lambda: every.where(self._in_runs(every.digits)))
        if self.limits.storage is None:
            return choices
        layouts = tuple(space.layout(int(code)) for code in choices.rows)
        allowed = self.limits.storage(tensor, layouts)
        return self.known.once((key, allowed.tobytes()), lambda: choices.where(allowed))

    def _stored(self, tensor: Tensor, space: LayoutSpace, count: int, *, counted: bool) -> Choices:
        """Price the layouts in which a parameter may be stored.

        `counted`: the operators that save the weight count its bytes.
        """
        basis = self.basis
        train = basis.analysis.train
        digits = space.digits()
        # The optimizer updates values: a stored parameter is not partial, nor is its gradient.
        whole_or_split = tuple(
            number
            for number, kind in enumerate(space.kinds)
            if kind == R or kind.kind is Kind.SPLIT
        )
        valid = space.valid(tensor.shape) & _all_among(space, whole_or_split)
        rows = self._storable(space, np.nonzero(valid)[0])
        if tensor.narrow is not None:
            fits = [cuts_no_byte(tensor, space.layout(int(code)), basis.mesh) for code in rows]
            rows = rows[fits]
        # The optimizer works on the stored shard alone.
        shards = space.divisors()[rows]
        seconds = self._stored_seconds(tensor, shards) if train else np.zeros(len(rows))
        if train and tensor.name in basis.matrices:
            layouts = [space.layout(int(code)) for code in rows]
            own = [share_of(tensor, layout, basis.prices).seconds for layout in layouts]
            seconds = seconds + np.array(own)
        method = optimizer_of(tensor, basis.optimizer, basis.matrices)
        memory = storage_bytes(
            tensor,
            shards,
            method,
            train=train,
            types=basis.types,
            moment=basis.prices.cluster.framework.moment,
        )
        if counted:
            memory = memory - tensor.bytes / shards
        return Choices(
            rows=rows,
            seconds=count * self.work.once * seconds,
            memory=count * memory,
            digits=digits[rows],
        )

    def _stored_seconds(self, tensor: Tensor, shards: Ints) -> Floats:
        """Return the seconds of a stored parameter's update, and of its casts.

        The casts are of the parameter to the type of use, and of its gradients' sum to that of
        storage.
        """
        basis = self.basis
        cluster = basis.prices.cluster
        method = optimizer_of(tensor, basis.optimizer, basis.matrices)
        update = update_seconds(tensor, shards, method, cluster, basis.types)
        casts = cast_seconds(tensor, shards, cluster, basis.types)
        if tensor.name in basis.analysis.gradients:
            casts = casts + home_seconds(tensor, shards, basis.types, cluster.device)
        return update + (1 - self.work.covers) * casts

    def _storable(self, space: LayoutSpace, codes: Ints) -> Ints:
        """Return the codes of those layouts that a DTensor can have."""
        return codes[[is_storable(space.layout(int(code)), self.basis.mesh) for code in codes]]

    def _in_runs(self, digits: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which rows of `digits` [choices, axes] have no more runs than the limits allow."""
        if self.limits.runs is None:
            return np.ones(len(digits), dtype=bool)
        changes = (digits[:, 1:] != digits[:, :-1]).sum(axis=1)
        return np.asarray(changes < self.limits.runs)

    # --- operators ---

    def decided(self, region: Region) -> Iterator[tuple[Region, tuple[Allowed, ...], Ints]]:
        """The region, or its parts where members differ: what may be chosen, and its digits.

        Equal regions have equal objects.
        """
        offers = [self.basis.analysis.offers[name] for name in region.members]
        joint = self._joint(region, offers)
        rows = None if joint is None else self._rows(region, offers, joint)
        if joint is not None and rows is not None and (len(rows) or len(region.members) == 1):
            allowed = self.known.once(
                ("allowed", joint, rows.tobytes()),
                lambda: tuple(Allowed(strategies=own, rows=rows) for own in joint.strategies),
            )
            yield region, allowed, joint.digits
            return
        for part in region.apart():
            yield from self.decided(part)

    def _joint(self, region: Region, offers: Sequence[Offer]) -> Joint | None:
        own = [self.known.once(("strategies", of), partial(self._strategies, of)) for of in offers]
        if len(own) == 1:
            return self.known.once(
                ("joint", own[0]), lambda: Joint(strategies=(own[0],), digits=own[0].choices)
            )
        lead = region.members.index(region.lead)
        key = ("joint", tuple(own), region.links, lead)
        return self.known.once(key, lambda: joint_strategies(region, own))

    def _rows(self, region: Region, offers: Sequence[Offer], joint: Joint) -> Ints | None:
        """The numbers of the strategies that may be chosen; None where members do not agree."""
        count = len(joint.digits)
        rows = self.known.once(("rows", count), lambda: np.arange(count))
        limit = self.limits.strategies
        if limit is None:
            return rows[self._in_runs(joint.digits)]
        asked = zip(region.members, offers, joint.strategies, strict=True)
        try:
            return rows[np.all([limit(*of) for of in asked], axis=0)]
        except NoAssignment:
            if len(offers) == 1:
                raise
            return None

    def _strategies(self, offer: Offer) -> Strategies:
        """Return the strategies of equal operators.

        On a mesh of many axes a matrix product splits every axis if it can, or is computed by every
        device alike, unless something is pinned.
        """
        mesh = self.basis.mesh
        strategies = strategies_of(offer.rule, offer.options, mesh)
        if len(mesh) < THRIFTY_AXES or self.limits.strategies is not None:
            return strategies
        if not RULES[offer.call.operator.kind].products:
            return strategies
        is_split = np.array([option.factor >= 0 for option in offer.options])
        splits = is_split[strategies.choices].all(axis=1)
        if not splits.any():
            return strategies
        alike = (strategies.choices == strategies.choices[:, :1]).all(axis=1)
        choices = np.ascontiguousarray(strategies.choices[splits | alike])
        return replace(strategies, choices=choices)

    # --- fan-outs and outputs ---

    def fan_out(self, name: str, codes: Codes, kinds: Sequence[int]) -> Choices:
        """Return the layouts from which the readers of a value may take it.

        `codes`: the layouts in which the value is made. `kinds`: the numbers of the kinds in which
        its readers take it.
        """
        space = self.basis.spaces[name]
        tensor = self.basis.graph.tensors[name]
        key = ("fan-out", space, tensor.shape, codes, tuple(kinds))

        def make() -> Choices:
            wanted = space.valid(tensor.shape) & _all_among(space, kinds)
            wanted &= self._in_runs(space.digits())
            # The layouts of the maker cost nothing to stay in.
            wanted[codes.array] = True
            return _free(space, np.nonzero(wanted)[0])

        return self.known.once(key, make)

    def output(self, name: str) -> Choices:
        """Return the layouts in which a value may leave the model.

        The loss, and what is handed on to the next step, leave whole.
        """
        graph = self.basis.graph
        limits = self.limits
        space = self.basis.spaces[name]
        tensor = graph.tensors[name]
        whole = name in (graph.loss, *graph.updates.values())
        # A caller does not add up shares: neither a value that leaves nor its gradient may be
        # partial.
        kinds = tuple(
            number
            for number, kind in enumerate(space.kinds)
            if kind == R or (kind.kind is Kind.SPLIT and not whole)
        )
        key = ("output", space, tensor.shape, kinds, limits.outputs.get(name))

        def make() -> Choices:
            if name in limits.outputs:
                return _free(space, np.array([space.code(limits.outputs[name])]))
            valid = space.valid(tensor.shape) & _all_among(space, kinds)
            valid &= self._in_runs(space.digits())
            return _free(space, self._storable(space, np.nonzero(valid)[0]))

        return self.known.once(key, make)


def saved_by_operators(basis: Basis) -> SavedValues:
    """Return the values that every operator saves for its backward pass."""
    segments = basis.work.segments
    saving = basis.prices.cluster.framework.saving
    return basis.known.once(
        ("saved values", segments, saving), lambda: saved_values(basis.analysis, segments, saving)
    )


def _all_among(space: LayoutSpace, kinds: Sequence[int]) -> NDArray[np.bool_]:
    """Return which layouts have one of these kinds on every axis."""
    among = np.zeros(len(space.kinds), dtype=bool)
    among[list(kinds)] = True
    return np.asarray(among[space.digits()].all(axis=1))


def _free(space: LayoutSpace, rows: Ints) -> Choices:
    """Return layouts that cost nothing by themselves."""
    zero = np.zeros(len(rows))
    return Choices(rows=rows, seconds=zero, memory=zero, digits=space.digits()[rows])


def kinds_read(basis: Basis, name: str, readers: Iterable[tuple[int, int]]) -> list[int]:
    """Return the kinds, by their numbers in the tensor's space, in which readers may take it."""
    space = basis.spaces[name]
    kinds: set[Placement] = set()
    for operator, position in readers:
        if operator >= 0:
            op = basis.graph.operators[operator]
            kinds |= {option.inputs[position] for option in basis.analysis.offers[op.name].options}
    return sorted(space.kinds.index(kind) for kind in kinds)


def codes_of(basis: Basis, op: Operator, allowed: Allowed, position: int, *, output: bool) -> Codes:
    """Return the layouts of one tensor of an operator under each strategy that may be chosen."""
    known = basis.known
    space = basis.spaces[op.outputs[position] if output else op.inputs[position]]

    def make() -> Codes:
        numbers: Mapping[Placement, int] = known.once(
            ("kinds", space), lambda: {kind: number for number, kind in enumerate(space.kinds)}
        )
        strategies = allowed.strategies
        placements = [
            (option.outputs if output else option.inputs)[position] for option in strategies.options
        ]
        kind_of_option = np.array([numbers[placement] for placement in placements])
        return known.codes(space.codes(kind_of_option[strategies.choices[allowed.rows]]))

    return known.once(("codes of operator", allowed, position, output, space), make)
