"""Micro-batches: the model, its options and a plan's decisions on one of m equal parts of the
batch.

`time_split` lays every tensor on an axis of time. A dim that lies as S(d, q) there holds 1/m of its
elements on a micro-batch. A split of that dim within p parts becomes a split within p / m parts
where p > q, since its parts lie inside the cut; where p <= q it stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from autopar.errors import UsageError
from autopar.ir import Role, Tensor

from .analysis import Analysis, Offer
from .layout import Kind, Layout, Placement, S, format_layout, is_valid
from .program import Assignment, Decision
from .strategies import Option
from .time_split import TimeSplit, micro_batch_options

__all__ = [
    "inner",
    "micro_batch_options",
    "of_micro_batch",
    "of_whole_batch",
    "outer",
    "split_batch",
]


def inner(
    placement: Placement, time: Placement, m: int, *, single: bool = False
) -> Placement | None:
    """Translate a placement from the whole batch to one of m micro-batches.

    None where no equal placement exists.

    `single`: a micro-batch is one sample, so no split takes samples apart, and the parts of the cut
    are the whole of it.

    >>> str(inner(S(0, 8), S(0), 4)), inner(S(0, 2), S(0), 4), str(inner(S(1), S(0), 4))
    ('S0/2', None, 'S1')
    """
    if (
        placement.kind is not Kind.SPLIT
        or time.kind is not Kind.SPLIT
        or placement.dim != time.dim
        or placement.parts < time.parts
    ):
        return placement
    if placement.parts == time.parts:
        # Both split the same parts; of one sample there is nothing left in them to split.
        return None if single else placement
    parts = placement.parts // m
    # If p / m were q, the split would read as one of the cut's own parts, and `outer` could not
    # tell the two apart.
    fits = placement.parts % (time.parts * m) == 0 and (single or parts > time.parts)
    return S(placement.dim, parts) if fits else None


def outer(placement: Placement, time: Placement, m: int, *, single: bool = False) -> Placement:
    """The reverse of `inner`.

    >>> str(outer(S(0, 2), S(0), 4)), str(outer(S(0), S(0), 4))
    ('S0/8', 'S0')
    """
    if (
        placement.kind is not Kind.SPLIT
        or time.kind is not Kind.SPLIT
        or placement.dim != time.dim
        or placement.parts < time.parts
    ):
        return placement
    return (
        placement
        if placement.parts == time.parts and not single
        else S(placement.dim, placement.parts * m)
    )


def split_batch(analysis: Analysis, m: int) -> Analysis:
    """The analysis of one of m micro-batches: local tensor shapes, options under their names of the
    whole batch.

    Operators that share an offer go on sharing one. Sizes inside attributes are not rewritten,
    since pricing reads only shapes and rules.
    """
    if m < 1:
        raise UsageError(f"{m} micro-batches: there must be at least one")
    if m == 1:
        return analysis
    time = micro_batch_options(analysis)
    if time.size % m:
        raise UsageError(f"a batch of {time.size} cannot be cut into {m} equal micro-batches")
    return _Split(analysis, time, m).run()


class _Split:
    """Makes the analysis of a micro-batch, each distinct part of it once."""

    def __init__(self, analysis: Analysis, time: TimeSplit, m: int) -> None:
        self.analysis = analysis
        self.time = time
        self.m = m
        # A micro-batch may be a single sample, of which no split takes a part.
        self.single = time.size == m
        self.offers: dict[tuple[int, int], Offer] = {}
        self.kinds: dict[object, tuple[Placement, ...]] = {}

    def run(self) -> Analysis:
        analysis = self.analysis
        time = self.time
        given = analysis.graph.tensors
        # Whole on every device: constants, and inputs that the preamble processes once for all
        # micro-batches.
        cold = (
            op
            for op in analysis.graph.operators
            if op.name in analysis.cold and op.name not in time.options
        )
        once = {name for op in cold for name in op.inputs if given[name].role is Role.INPUT}
        once |= {name for name, tensor in given.items() if tensor.role is Role.CONSTANT}
        made = {
            name: t if name in once else self._tensor(t, time.placements[name])
            for name, t in given.items()
        }
        return replace(
            analysis,
            graph=replace(analysis.graph, tensors=made),
            offers={name: self._offer(name, offer) for name, offer in analysis.offers.items()},
            kinds={name: self._kinds(made[name], kinds) for name, kinds in analysis.kinds.items()},
        )

    def _tensor(self, tensor: Tensor, placement: Placement) -> Tensor:
        if placement.kind is not Kind.SPLIT:
            return tensor
        if tensor.shape[placement.dim] % (placement.parts * self.m):
            raise UsageError(
                f"{tensor.name!r} of shape {list(tensor.shape)} cannot be cut into {self.m} equal "
                "micro-batches"
            )
        shape = list(tensor.shape)
        shape[placement.dim] //= self.m
        return replace(tensor, shape=tuple(shape))

    def _offer(self, name: str, offer: Offer) -> Offer:
        option = self.time.options[name]
        # The analysis and the split over time keep both objects alive, so their ids stay theirs.
        key = (id(offer), id(option))
        if key not in self.offers:
            self.offers[key] = self._local(offer, option)
        return self.offers[key]

    def _local(self, offer: Offer, time: Option) -> Offer:
        """An offer on local sizes."""
        m = self.m
        rule = offer.rule
        call = offer.call
        if time.factor >= 0:
            sizes = (
                replace(f, size=f.size // m) if i in (time.factor, *time.partners) else f
                for i, f in enumerate(rule.factors)
            )
            rule = replace(rule, factors=tuple(sizes))
        inputs = tuple(self._tensor(t, p) for t, p in zip(call.inputs, time.inputs, strict=True))
        outputs = tuple(self._tensor(t, p) for t, p in zip(call.outputs, time.outputs, strict=True))
        # Options that differ on the whole batch may become one on a micro-batch.
        distinct: dict[object, Option] = {}
        for option in offer.options:
            local = self._option(option, time)
            if local is not None and (option.factor < 0 or rule.factors[option.factor].size > 1):
                key = (local.inputs, local.outputs, local.communication)
                distinct.setdefault(key, local)
        call = replace(call, inputs=inputs, outputs=outputs)
        return Offer(call=call, rule=rule, options=tuple(distinct.values()))

    def _option(self, option: Option, time: Option) -> Option | None:
        times = (*time.inputs, *time.outputs)
        placements = [
            inner(p, t, self.m, single=self.single)
            for p, t in zip((*option.inputs, *option.outputs), times, strict=True)
        ]
        local = tuple(placement for placement in placements if placement is not None)
        if len(local) < len(placements):
            return None
        parts = option.parts
        # The option's own parts shrink as those of its placements do.
        if option.factor == time.factor and option.factor >= 0 and parts > time.parts:
            parts //= self.m
        return replace(
            option,
            parts=parts,
            inputs=local[: len(option.inputs)],
            outputs=local[len(option.inputs) :],
        )

    def _kinds(self, tensor: Tensor, kinds: tuple[Placement, ...]) -> tuple[Placement, ...]:
        time = self.time.placements[tensor.name]
        if time.kind is not Kind.SPLIT:
            return kinds
        # Of the shape only the cut dim differs from the whole batch's, and matters if it is 1 now.
        key = (kinds, time, tensor.shape[time.dim] > 1)
        if key not in self.kinds:
            local = (inner(kind, time, self.m, single=self.single) for kind in kinds)
            fits = (
                k
                for k in local
                if k is not None and (k.kind is not Kind.SPLIT or tensor.shape[k.dim] > 1)
            )
            self.kinds[key] = tuple(dict.fromkeys(fits))
        return self.kinds[key]


def of_micro_batch(
    assignment: Assignment, analysis: Analysis, micro: Analysis, m: int
) -> Assignment:
    """Translate decisions for the whole batch to one of m micro-batches; `UsageError` if it cannot
    be cut so.
    """
    return _translated(assignment, micro, micro_batch_options(analysis), m, inner)


def of_whole_batch(
    assignment: Assignment, analysis: Analysis, micro: Analysis, m: int
) -> Assignment:
    """Translate the decisions for one of m micro-batches to the whole batch.

    Strategies keep their names; splits within parts get the part counts of the whole batch.
    """
    return _translated(assignment, analysis, micro_batch_options(analysis), m, outer)


class _Translate(Protocol):
    def __call__(
        self, placement: Placement, time: Placement, m: int, *, single: bool
    ) -> Placement | None: ...


def _translated(
    assignment: Assignment, target: Analysis, time: TimeSplit, m: int, translate: _Translate
) -> Assignment:
    mesh = assignment.mesh.shape

    def layout(name: str, before: Layout) -> Layout:
        lies = [
            translate(placement, time.placements[name], m, single=time.size == m)
            for placement in before
        ]
        local = tuple(placement for placement in lies if placement is not None)
        if len(local) < len(lies) or not is_valid(local, target.graph.tensors[name].shape, mesh):
            raise UsageError(
                f"{name!r} cannot lie as [{format_layout(before)}] when the batch is cut into {m} "
                "micro-batches"
            )
        return local

    # Storage stays as it is: parameters hold no samples.
    return replace(
        assignment,
        decisions={
            name: _decision(name, decision, target, mesh, m)
            for name, decision in assignment.decisions.items()
        },
        outputs={name: layout(name, before) for name, before in assignment.outputs.items()},
        chains={
            name: tuple(tuple(layout(name, x) for x in chain) for chain in chains)
            for name, chains in assignment.chains.items()
        },
    )


def _decision(
    name: str, decision: Decision, target: Analysis, mesh: tuple[int, ...], m: int
) -> Decision:
    # The preamble lies whole on every axis of the mesh, whatever the batch.
    if decision.rule is None:
        return decision
    offer = target.offers[name]
    # Options keep their names between the whole batch and a micro-batch.
    known = {option.name: option for option in offer.options}
    missing = [option.name for option in decision.options if option.name not in known]
    if missing:
        raise UsageError(
            f"{name!r} cannot split {missing[0]!r} when the batch is cut into {m} micro-batches"
        )
    options = tuple(known[option.name] for option in decision.options)
    cut = Decision.chosen(options, offer, mesh)
    # The names fit, yet the smaller sizes may not divide.
    if cut is None:
        strategy = " ".join(option.name for option in options)
        raise UsageError(
            f"the strategy {strategy} of {name!r} does not divide its sizes when the batch is cut "
            f"into {m} micro-batches"
        )
    return cut
