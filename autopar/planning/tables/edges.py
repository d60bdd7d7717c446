"""The edges of the tables: seconds of redistributing a tensor between two variables' choices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.costmodel.cluster.measured_collectives import Line
from autopar.costmodel.redistribution.distances import Distances
from autopar.costmodel.redistribution.layout_space import LayoutSpace
from autopar.costmodel.redistribution.step_prices import Charges
from autopar.ir import Tensor
from autopar.sharding.layout import Kind
from autopar.sharding.mesh import Axes

from .outline import Join, Outline
from .parameters.handling import Handling, Way, handling
from .tables import Basis, Floats, Ints, Known
from .values import ValueTables

KINDS = (Kind.SPLIT, Kind.BROADCAST, Kind.REPLICATED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Joined:
    """The table of a parameter's join, and its parts that `Tables` calls `aside` and `each`."""

    value: Floats
    aside: Floats
    each: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sent:
    """The seconds of a parameter's collectives on a join."""

    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Handled:
    """The seconds of a device's work on a parameter of a join, and of each further pass."""

    seconds: Floats
    each: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parameter:
    """All of a parameter that its tables depend on; equal parameters share one object."""

    tensor: Tensor
    space: LayoutSpace
    trained: bool


class TableEdges:
    """The edges of an outline; equal tables are one array.

    `aside`, `each`: see `Tables`. `parameters`: those whose facts were looked up, by name.
    `joined`: the tables of equal joins of parameters.
    """

    def __init__(self, basis: Basis, outline: Outline) -> None:
        self.basis = basis
        self.outline = outline
        self.variables = outline.variables
        self.known = basis.known
        self.edges: dict[tuple[int, int], Floats] = {}
        self.aside: dict[tuple[int, int], Floats] = {}
        self.each: dict[tuple[int, int], Floats] = {}
        self.parameters: dict[str, _Parameter] = self.known.once(
            "facts of parameters", dict[str, _Parameter]
        )
        self.joined: dict[object, _Joined] = {}

    def price(self, values: ValueTables) -> None:
        """Price every join; those of values are in `values`."""
        tables = values.priced(self.basis.work)
        # The terms of a pair's table, as objects or numbers: equal sums are made once.
        terms: dict[tuple[int, int], tuple[object, ...]] = {}
        sums: dict[tuple[object, ...], Floats] = {}
        for number, join in enumerate(self.outline.joins):
            # A cost graph has ordered pairs, and one table for a pair that several tensors join.
            pair = (min(join.source, join.target), max(join.source, join.target))
            term: object
            if number in values.class_of:
                term = values.class_of[number]
                table = tables[values.class_of[number]]
            else:
                term = joined = self._parameter(join)
                table = joined.value
            if pair not in self.edges:
                self.edges[pair] = table
                terms[pair] = (term,)
                continue
            terms[pair] = (*terms[pair], term)
            if terms[pair] not in sums:
                sums[terms[pair]] = self.edges[pair] + table
            self.edges[pair] = sums[terms[pair]]

    def _parameter(self, join: Join) -> _Joined:
        """Return the table of a parameter's join, and note the part that is no communication.

        The join's source always comes before its target.
        """
        joined = self._joined(join)
        pair = (join.source, join.target)
        self.aside[pair] = joined.aside
        self.each[pair] = joined.each
        return joined

    def _joined(self, join: Join) -> _Joined:
        """Return the tables of a join, one value for all that are equal."""
        parameter = self._facts(join.tensor)
        stored = self._is_stored(join)
        # On the way from its storage a parameter has no reader yet.
        readers = None if stored else tuple(filter(None, (join.reader,)))
        hidden = self.basis.work.hidden_of(join.tensor, readers)
        key = (parameter, join.source_codes, join.target_codes, join.count, stored, hidden)
        if key not in self.joined:
            sent = self._sent(parameter, join, stored=stored, hidden=hidden)
            handled = self._handled(parameter, join, further=not stored)
            self.joined[key] = self.known.once(
                ("joined", sent, handled),
                lambda: _Joined(
                    value=sent.seconds + handled.seconds, aside=handled.seconds, each=handled.each
                ),
            )
        return self.joined[key]

    def _is_stored(self, join: Join) -> bool:
        """Whether a parameter comes from its storage."""
        return self.variables[join.source].what == "parameter"

    def _facts(self, name: str) -> _Parameter:
        """Return all of a parameter that its tables depend on."""
        if name not in self.parameters:
            tensor = self.basis.graph.tensors[name]
            space = self.basis.spaces[name]
            trained = name in self.basis.analysis.gradients
            key = (
                "parameter's facts",
                space,
                tensor.shape,
                tensor.dtype,
                tensor.narrow,
                tensor.trainable,
                trained,
            )
            self.parameters[name] = self.known.once(
                key, lambda: _Parameter(tensor=tensor, space=space, trained=trained)
            )
        return self.parameters[name]

    def _sent(self, parameter: _Parameter, join: Join, *, stored: bool, hidden: float) -> _Sent:
        """Return the seconds of a parameter's collectives.

        Tables that differ only by a common factor are made once, and multiplied.
        """
        basis = self.basis
        work = self.basis.work
        tensor = parameter.tensor
        from_storage = stored and parameter.trained
        ahead, back = work.of_parameters(hidden)
        # Counts differ from mode to mode mostly by a factor, which is taken out of the key.
        scale = back or 1.0
        often = (ahead / scale, back / scale)
        exposed = work.once * (1 - hidden) / scale
        known = self.known.on_mesh
        key = (
            "distances",
            parameter.space,
            tensor.shape,
            tensor.bytes,
            basis.types.wider(tensor),
            parameter.trained,
            from_storage,
            often,
            exposed,
            (work.busy, work.beside),
            join.source_codes,
            join.target_codes,
        )

        def table() -> Floats:
            prices = self._distances(known, parameter, often)
            sources = join.source_codes.array
            # From storage, leading sums of gradients travel in buckets.
            if from_storage:
                summed = basis.types.reduced_bytes(tensor)
                lines = partial(self._unit_lines, tensor)
                rows = prices.rows_from_storage(sources, lines, summed, exposed)
            else:
                rows = prices.rows(sources)
            return np.ascontiguousarray(rows[:, join.target_codes.array])

        factor = scale * join.count
        return known.once((key, factor), lambda: _Sent(seconds=factor * known.once(key, table)))

    def _handled(self, parameter: _Parameter, join: Join, *, further: bool) -> _Handled:
        """Return the seconds of a device's copies and casts, in a step and in each further pass.

        `further`: the redistribution begins at a fan-out.
        """
        basis = self.basis
        work = self.basis.work
        tensor = parameter.tensor
        known = self.known.on_mesh
        key = (
            "handled",
            parameter.space,
            tensor.bytes,
            parameter.trained,
            basis.types.reduced(tensor),
            join.source_codes,
            join.target_codes,
        )

        def table() -> Handling:
            way = _way(parameter.space, join.source_codes.array, join.target_codes.array)
            return handling(tensor, way, basis.prices, basis.types, trained=parameter.trained)

        def seconds() -> _Handled:
            all_ways = known.once(key, table)
            handled = all_ways.further if further else all_ways
            return _Handled(
                seconds=join.count * handled.seconds(work), each=join.count * handled.each(work)
            )

        often = (work.passes, work.covers, work.once, work.accumulating, work.zero)
        return known.once((key, often, join.count, further), seconds)

    def _distances(
        self, known: Known, parameter: _Parameter, often: tuple[float, float]
    ) -> Distances:
        """Return the distances between layouts of a parameter.

        Parameters of equal bytes and equal valid layouts share them.
        """
        basis = self.basis
        tensor = parameter.tensor
        space = parameter.space
        wider = basis.types.wider(tensor)
        links = (basis.work.busy, basis.work.beside)
        # The shape matters only by the layouts that it admits.
        valid = space.valid(tensor.shape).tobytes()
        key = ("reach", space, tensor.bytes, wider, parameter.trained, often, valid, links)
        return known.once(
            key,
            lambda: Distances(
                space,
                tensor.shape,
                tensor.bytes,
                Charges(lines=partial(self._unit_lines, tensor), often=often, wider=wider),
                gradient=parameter.trained,
            ),
        )

    def _unit_lines(self, tensor: Tensor, kind: str, axes: Axes) -> tuple[Line, ...]:
        """Return the line of a parameter's part of a message, as far as its link counts."""
        prices = self.basis.prices
        work = self.basis.work
        lines = prices.unit_lines(kind, axes, tensor.bytes)
        # Bounds weigh links: what another link sends may run beside the busiest.
        if work.busy in ("", prices.link(axes)):
            return lines
        return tuple((work.beside * alpha, work.beside * beta) for alpha, beta in lines)


def _way(space: LayoutSpace, sources: Ints, targets: Ints) -> Way:
    """Return the ways between layouts of storage and of use: arrays [sources, targets, axes]."""
    split, broadcast, whole = (np.array([kind.kind is of for kind in space.kinds]) for of in KINDS)
    first = np.array(
        [kind.kind is Kind.SPLIT and kind.dim == 0 and kind.parts == 1 for kind in space.kinds]
    )
    stored = space.digits()[sources][:, None, :]
    used = space.digits()[targets][None, :, :]
    gathered = split[stored] & ~split[used]
    return Way(
        group=stored * len(space.kinds) + used,
        gathered=gathered,
        first=first[stored],
        reduced=gathered & broadcast[used],
        summed=whole[stored] & broadcast[used],
        shards=space.divisors()[sources][:, None].astype(np.float64),
    )
