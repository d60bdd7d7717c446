"""The seconds and bytes of every operator's choices, for any multiplicities.

Few products of long arrays give all of them.

    seconds = n c s + t            n: equal operators, c: how often a micro-batch counts, s: of one,
                                   t: between ties
    bytes   = n (w W + f F)        W: saved of parameters, w: how often; F: of values, f:
            micro-batches in flight

The arrays hold the choices of all operators, one behind the other, those of equal operators once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.device.operator_seconds import operator_seconds
from autopar.costmodel.memory.saved_values import SavedValues, Share
from autopar.costmodel.step.mesh_prices import communication_seconds
from autopar.ir import Operator
from autopar.planning.space import Multiplicities
from autopar.sharding.analysis import Offer
from autopar.sharding.notation import local_elements
from autopar.sharding.strategies import Strategies

from .choices import saved_by_operators
from .outline import Decided, Outline
from .tables import Basis, Choices, Floats, Ints

BATCH_TIE = 1e-12
"""Seconds by which an earlier factor (the batch comes first) is preferred among strategies of equal
price.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTables:
    """Arrays [choices of all operators] of the terms of both formulas.

    They are `counts` n, `seconds` s, `ties` t, `weights` W and `values` F.

    `spans`: the part of each class of equal operators, with its strategies' `rows` and `digits`;
    `class_of`: by the number of a variable. `wider`: bytes of the gradient for each byte of a
    gathered copy of a parameter; 0 on one device, which has none.
    """

    counts: Floats
    seconds: Floats
    ties: Floats
    weights: Floats
    values: Floats
    spans: tuple[slice, ...]
    rows: tuple[Ints, ...]
    digits: tuple[Ints, ...]
    class_of: Mapping[int, int]
    wider: float

    def priced(self, work: Multiplicities) -> dict[int, Choices]:
        """Return the choices of all operators, by the number of their variable.

        Equal operators have one object.
        """
        # Two products of long arrays price all operators at once.
        seconds = (self.counts * work.counted) * self.seconds + self.ties
        memory = self._memory(work)
        parts = zip(self.spans, self.rows, self.digits, strict=True)
        choices = [
            Choices(rows=rows, seconds=seconds[span], memory=memory[span], digits=digits)
            for span, rows, digits in parts
        ]
        return {variable: choices[number] for variable, number in self.class_of.items()}

    def least_saved(self, work: Multiplicities) -> float:
        """Return the least bytes that all operators save for the backward pass."""
        if not self.spans:
            return 0.0
        # The spans lie one behind the other, so that their starts are all that is needed.
        starts = [span.start for span in self.spans]
        least = np.minimum.reduceat(self._memory(work), starts).tolist()
        return math.fsum(least[number] for number in self.class_of.values())

    def _memory(self, work: Multiplicities) -> Floats:
        """Return the bytes of every choice of all operators."""
        saved = self._weight_often(work) * self.weights + work.in_flight * self.values
        return self.counts * saved

    def _weight_often(self, work: Multiplicities) -> float:
        """Return the extra bytes for each byte of a gathered parameter.

        These are the copy, and its gradient if that is added up whole.
        """
        if work.zero == 3:
            # The copy is gathered for every pass, and released behind it.
            return 0.0
        if work.zero == 1 and work.accumulating:
            return 1.0 + self.wider
        return 1.0


def operator_tables(basis: Basis, outline: Outline) -> OperatorTables:
    """Return the tables of an outline's operators, with the recomputed segments of the basis."""
    saved = saved_by_operators(basis)
    classes = dict[object, int]()
    class_of = dict[int, int]()
    parts: list[tuple[int, Floats, Floats, Floats]] = []
    rows: list[Ints] = []
    digits: list[Ints] = []
    for variable, decided in outline.regions.items():
        members = [_member(basis, op, saved) for op in decided.operators]
        count = basis.work.counts.operators.get(decided.operators[0].name, 1)
        key = (decided.allowed, tuple(members), count)
        # Equal operators are in the arrays once.
        if key not in classes:
            classes[key] = len(parts)
            chosen = decided.allowed[0].rows
            seconds, weights, values = (
                functools.reduce(np.add, of_each)[chosen]
                for of_each in zip(*_figures(basis, decided, members), strict=True)
            )
            parts.append((count, seconds, weights, values))
            rows.append(chosen)
            digits.append(decided.digits[chosen])
        class_of[variable] = classes[key]
    ends = np.cumsum([0, *map(len, rows)]).tolist()
    return OperatorTables(
        counts=_joined([np.full(len(part[1]), float(part[0])) for part in parts]),
        seconds=_joined([part[1] for part in parts]),
        ties=_joined([BATCH_TIE * of.sum(axis=1) for of in digits]),
        weights=_joined([part[2] for part in parts]),
        values=_joined([part[3] for part in parts]),
        spans=tuple(map(slice, ends[:-1], ends[1:])),
        rows=tuple(rows),
        digits=tuple(digits),
        class_of=class_of,
        wider=max((basis.types.wider(tensor) for tensor in basis.graph.parameters), default=1.0)
        if math.prod(basis.mesh) > 1
        else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """All of an operator that its seconds and bytes depend on, beside its strategies."""

    offer: Offer
    shares: tuple[Share, ...]
    recomputed: bool


def _member(basis: Basis, op: Operator, saved: SavedValues) -> _Member:
    return _Member(
        offer=basis.analysis.offers[op.name],
        shares=saved.shares.get(op.name, ()),
        recomputed=op.name in basis.recomputed,
    )


def _figures(
    basis: Basis, decided: Decided, members: Sequence[_Member]
) -> Iterator[tuple[Floats, Floats, Floats]]:
    """The seconds of each member of a region, and the bytes saved of parameters and of values."""
    for (op, allowed), of in zip(decided.each(), members, strict=True):
        strategies = allowed.strategies
        yield (
            _seconds(basis, op, of, strategies),
            _saved_bytes(basis, strategies, of.shares, weight=True),
            _saved_bytes(basis, strategies, of.shares, weight=False),
        )


def _joined(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.zeros(0)


def _seconds(basis: Basis, op: Operator, member: _Member, strategies: Strategies) -> Floats:
    """Return the seconds of one micro-batch: array [strategies].

    Those of a recomputed operator include a second forward pass.
    """
    offer = member.offer

    def make() -> Floats:
        prices = basis.prices
        gradients = basis.analysis.as_offered(op, basis.analysis.gradients)
        forward, backward = operator_seconds(
            offer.call, strategies, basis.mesh, prices.cluster, gradients
        )
        inside = communication_seconds(offer.call, strategies, prices, gradients)
        # Half of the collectives inside belong to the forward pass.
        repeated = forward + 0.5 * inside if member.recomputed else 0.0
        return forward + backward + inside + repeated

    return basis.known.once(("seconds", offer, strategies, member.recomputed), make)


def _saved_bytes(
    basis: Basis, strategies: Strategies, shares: Sequence[Share], *, weight: bool
) -> Floats:
    """Bytes that a choice saves of parameters, or of values: array [strategies]."""
    taken = tuple(share for share in shares if share.weight == weight)
    return basis.known.once(
        ("saved", strategies, taken), lambda: share_bytes(strategies, basis.mesh, taken)
    )


def share_bytes(strategies: Strategies, mesh: Sequence[int], shares: Iterable[Share]) -> Floats:
    """Bytes of the shares of what an operator saves, on one device: array [strategies]."""
    sizes = np.array([factor.size for factor in strategies.rule.factors], dtype=np.float64)
    local = sizes / strategies.degrees(tuple(mesh))
    total = np.zeros(len(local))
    for share in shares:
        dims = strategies.rule.outputs if share.output else strategies.rule.inputs
        elements = local_elements(dims[share.position], local)
        made = share.made
        # Such a value is split by these factors without communication.
        if made is not None and made.factors:
            elements = elements / strategies.plain_degree(tuple(mesh), made.factors)
            if made.inside:
                elements = elements / strategies.passing_degree(tuple(mesh), made.factors)
        if made is not None and made.passed:
            shards = strategies.passing_degree(tuple(mesh), made.passed)
            elements = elements * made.times(shards, strategies.rule.size_of(made.passed))
        total += elements * share.nbytes
    return total
