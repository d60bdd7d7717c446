"""The edges of the tables: the cost of redistributing a tensor from each choice of its maker to each of its reader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.costmodel.cluster.measured import Line
from autopar.costmodel.step.distances import Distances
from autopar.costmodel.step.layout_space import LayoutSpace

from ..ir import Tensor
from ..sharding.layout import Kind
from ..sharding.mesh import Axes
from .outline import Join, Outline
from .parameter_handling import Handling, Way, handling
from .tables import Basis, Floats, Ints, Known
from .value_tables import ValueTables

KINDS = (Kind.SPLIT, Kind.BROADCAST, Kind.REPLICATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """The table of a parameter's join, what of it is `aside`, and `each` (see `Tables`)."""

    value: Floats
    aside: Floats
    each: Floats


class TableEdges:
    """The edges of an outline; equal tables are one array.

    `aside`, `each`: see `Tables`. `facts`: of each parameter a number for all of it that tables depend on.
    `joined`: the tables of equal joins of parameters.
    """

    def __init__(self, basis: Basis, outline: Outline) -> None:
        self.basis, self.outline, self.variables, self.known = basis, outline, outline.variables, basis.known
        self.edges: dict[tuple[int, int], Floats] = {}
        self.aside: dict[tuple[int, int], Floats] = {}
        self.each: dict[tuple[int, int], Floats] = {}
        self.facts: dict[str, int] = self.known.once("facts of parameters", dict[str, int])
        self.joined: dict[object, _Joined] = {}

    def price(self, values: ValueTables) -> None:
        """Price every join; those of values are in `values`."""
        found, sums = values.priced(self.basis.work), dict[tuple[int, int], Floats]()
        for number, join in enumerate(self.outline.joins):
            # A cost graph has ordered pairs, and one table for a pair that several tensors join.
            pair = (min(join.source, join.target), max(join.source, join.target))
            value = found[values.class_of[number]] if number in values.class_of else self._parameter(join)
            if pair in self.edges:
                first, added = self.edges[pair], value
                if (id(first), id(added)) not in sums:
                    sums[id(first), id(added)] = first + added
                value = sums[id(first), id(added)]
            self.edges[pair] = value

    def _parameter(self, join: Join) -> Floats:
        """The table of a parameter's join, which its maker always precedes; the part that is no communication is noted."""
        found, pair = self._joined(join), (join.source, join.target)
        self.aside[pair], self.each[pair] = found.aside, found.each
        return found.value

    def _joined(self, join: Join) -> _Joined:
        """The tables of a join, one value for all that are equal."""
        number, work, stored = self._facts(join.tensor), self.basis.work, self._is_stored(join)
        hidden = work.hidden_of(join.tensor, None if stored else self.variables[join.target].name)
        key = (number, id(join.source_codes), id(join.target_codes), join.count, stored, hidden)
        if key not in self.joined:
            bare = self._table(join, hidden)
            aside, each = self._handled(join.tensor, join.source_codes, join.target_codes, join.count, further=not stored)
            self.known.keep += [bare, aside]
            value = self.known.once(("sum", id(bare), id(aside)), lambda: bare + aside)
            self.joined[key] = _Joined(value=value, aside=aside, each=each)
        return self.joined[key]

    def _is_stored(self, join: Join) -> bool:
        """Whether a parameter comes from its storage."""
        return self.variables[join.source].what == "parameter"

    def _facts(self, name: str) -> int:
        """A number for all of a parameter that tables depend on."""
        if name not in self.facts:
            basis, tensor = self.basis, self.basis.graph.tensors[name]
            key = ("tensor", id(basis.spaces[name]), tensor.shape, tensor.dtype, tensor.trainable, name in basis.analysis.gradients)
            self.facts[name] = self.known.once(key, lambda: len(self.known.parts))
        return self.facts[name]

    def _table(self, join: Join, hidden: float) -> Floats:
        """The seconds of a parameter's collectives; tables that differ only by a common factor are made once, and multiplied."""
        basis, work, lasting = self.basis, self.basis.work, self.known.lasting
        tensor, space = basis.graph.tensors[join.tensor], basis.spaces[join.tensor]
        trained = join.tensor in basis.analysis.gradients
        from_storage = self._is_stored(join) and trained
        ahead, back = work.of_parameters(hidden)
        scale = back or 1.0
        often, exposed = (ahead / scale, back / scale), work.once * (1 - hidden) / scale
        known, links, wider = self.known.of_parameters or self.known, (work.busy, work.beside), basis.wider(tensor)
        facts = ("distances", id(space), tensor.shape, tensor.bytes, wider, trained, from_storage, often, exposed, links)
        key = (facts, lasting(join.source_codes), lasting(join.target_codes))

        def table() -> Floats:
            prices = self._distances(known, tensor, space, often)
            if from_storage:
                summed = basis.types.reduced_bytes(tensor)
                rows = prices.rows_from_storage(join.source_codes, partial(self._unit_lines, tensor), summed, exposed)
            else:
                rows = prices.rows(join.source_codes)
            return np.ascontiguousarray(rows[:, join.target_codes])

        return known.once((key, scale * join.count), lambda: scale * join.count * known.once(key, table))

    def _handled(self, name: str, source_codes: Ints, target_codes: Ints, count: int, *, further: bool) -> tuple[Floats, Floats]:
        """Seconds of a device's copies and casts of `count` parameters, in a step and in each further pass.

        `further`: the redistribution begins at a fan-out.
        """
        basis, work = self.basis, self.basis.work
        tensor, space, trained = basis.graph.tensors[name], basis.spaces[name], name in basis.analysis.gradients
        known, codes = self.known.of_parameters or self.known, (self.known.lasting(source_codes), self.known.lasting(target_codes))
        key = ("handled", id(space), tensor.bytes, trained, basis.types.reduced(tensor), *codes)

        def table() -> Handling:
            split, broadcast, whole = (np.array([kind.kind is of for kind in space.kinds]) for of in KINDS)
            first = np.array([kind.kind is Kind.SPLIT and kind.dim == 0 and kind.parts == 1 for kind in space.kinds])
            stored, used = space.digits()[source_codes][:, None, :], space.digits()[target_codes][None, :, :]
            gathered = split[stored] & ~split[used]
            way = Way(
                group=stored * len(space.kinds) + used, gathered=gathered, first=first[stored], reduced=gathered & broadcast[used],
                summed=whole[stored] & broadcast[used], shards=space.divisors()[source_codes][:, None].astype(np.float64),
            )  # fmt: skip
            return handling(tensor, way, basis.prices, basis.types, trained=trained)

        def seconds() -> tuple[Floats, Floats]:
            found = known.once(key, table)
            found = found.further if further else found
            return count * found.seconds(work), count * found.each(work)

        return known.once((key, work.passes, work.covers, work.once, work.accumulating, work.zero, count, further), seconds)

    def _distances(self, known: Known, tensor: Tensor, space: LayoutSpace, often: tuple[float, float]) -> Distances:
        """The distances between layouts of a parameter; those of equal bytes and equal valid layouts are one."""
        basis = self.basis
        gradient, wider, lines = tensor.name in basis.analysis.gradients, basis.wider(tensor), partial(self._unit_lines, tensor)
        links, valid = (basis.work.busy, basis.work.beside), space.valid(tensor.shape).tobytes()
        key = ("reach", id(space), tensor.bytes, wider, gradient, often, valid, links)
        return known.once(key, lambda: Distances(space, tensor.shape, tensor.bytes, lines, gradient=gradient, often=often, wider=wider))

    def _unit_lines(self, tensor: Tensor, kind: str, axes: Axes) -> tuple[Line, ...]:
        """The line of a parameter's part of a message, as far as the link counts that it is sent over."""
        prices, work = self.basis.prices, self.basis.work
        found = prices.unit_lines(kind, axes, tensor.bytes)
        if work.busy in ("", prices.link(axes)):
            return found
        return tuple((work.beside * alpha, work.beside * beta) for alpha, beta in found)
