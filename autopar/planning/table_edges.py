"""The edges of the tables: the cost of redistributing a tensor from each choice of its maker to each of its reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.costmodel.cluster.measured import Line
from autopar.costmodel.step.distances import Distances
from autopar.costmodel.step.layout_space import LayoutSpace

from ..ir import Role, Tensor
from ..sharding.layout import Kind
from ..sharding.mesh import Axes
from .parameter_handling import Handling, Way, handling
from .tables import Basis, Floats, Ints, Known, Variable

KINDS = (Kind.SPLIT, Kind.BROADCAST, Kind.REPLICATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """The table of an edge; of a parameter's, what of it is `aside`, and `each` (see `Tables`)."""

    value: Floats
    aside: Floats | None
    each: Floats | None


class TableEdges:
    """Edges between `variables`, a list that still grows; equal tables are one array.

    `aside`, `each`: see `Tables`. `codes`: the layouts of a tensor by the choices of a variable. `made`: the maker of
    each tensor. `handed`: readers that must also read the last layer's value (see `hand_on`). `facts`: of each tensor a number for all of
    it that tables depend on, and whether it is a parameter. `joined`: the tables of equal edges.
    """

    def __init__(self, basis: Basis, variables: Sequence[Variable]) -> None:
        self.basis, self.variables, self.known = basis, variables, basis.known
        self.edges: dict[tuple[int, int], Floats] = {}
        self.aside: dict[tuple[int, int], Floats] = {}
        self.each: dict[tuple[int, int], Floats] = {}
        self.codes: dict[tuple[int, str], Ints] = {}
        self.made: dict[str, tuple[int, Ints]] = {}
        self.handed: list[tuple[str, int, Ints, int]] = []
        self.facts: dict[str, tuple[int, bool]] = self.known.once("facts of tensors", dict[str, tuple[int, bool]])
        self.joined: dict[object, _Joined] = {}

    def make(self, name: str, source: int, codes: Ints) -> None:
        """Record that variable `source` makes the tensor, in the layouts `codes`, one for each choice."""
        self.codes[source, name] = codes
        self.made[name] = source, codes

    def bring(self, name: str, fan: int) -> None:
        """Record that readers take the tensor from the variable `fan`."""
        self.codes[fan, name] = self.variables[fan].rows

    def edge(self, name: str, source: int, target: int, target_codes: Ints) -> None:
        """Add the edge to variable `target`, which needs the tensor in the layouts `target_codes`."""
        variable, counts = self.variables[target], self.basis.work.counts
        of = counts.operators if variable.what == "operator" else counts.tensors
        count = of.get(variable.name, 1)
        if name in counts.handed and self.made[name][0] == source and count > 1:
            self.handed.append((name, target, target_codes, count - 1))
            count = 1
        self._join(name, source, self.codes[source, name], target, target_codes, count)

    def hand_on(self) -> None:
        """Let readers of the first layer's values also read its representative's, once for each further layer."""
        for name, target, target_codes, count in self.handed:
            other = self.basis.work.counts.handed[name]
            source, codes = self.made[other]
            mine, theirs = self.basis.spaces[name], self.basis.spaces[other]
            # The two values may have different spaces: translate the layouts by their kinds.
            same = np.array([mine.kinds.index(kind) if kind in mine.kinds else -1 for kind in theirs.kinds])
            digits = same[theirs.digits()[codes]]
            assert (digits >= 0).all(), "equal operators give their outputs in equal ways"
            self._join(name, source, self._in_space(codes, digits, mine), target, target_codes, count)

    def _in_space(self, codes: Ints, digits: Ints, space: LayoutSpace) -> Ints:
        """The codes of layouts in `space`, given their `digits`; `codes`: their codes in their own space, as a key."""
        return self.known.once(("handed", id(codes), id(space)), lambda: space.codes(digits))

    def _join(self, name: str, source: int, source_codes: Ints, target: int, target_codes: Ints, count: int) -> None:
        """Add the edge of a redistribution that is done `count` times to the edges of this pair."""
        known = self.known
        found = self._joined(name, source, source_codes, target, target_codes, count)
        value = found.value
        if found.aside is not None and found.each is not None:
            self.aside[source, target], self.each[source, target] = found.aside, found.each
        # A cost graph has ordered pairs, and one table for a pair that several tensors join.
        pair = (source, target)
        if source > target:
            pair, before = (target, source), value
            value = known.once(("transposed", id(before)), lambda: np.ascontiguousarray(before.T))
        if pair in self.edges:
            first, added = self.edges[pair], value
            known.keep.append(first)
            value = known.once(("sum", id(first), id(added)), lambda: first + added)
        self.edges[pair] = value

    def _joined(self, name: str, source: int, source_codes: Ints, target: int, target_codes: Ints, count: int) -> _Joined:
        """The tables of an edge, one value for all that are equal."""
        basis, variable, stored = self.basis, self.variables[target], self.variables[source].what == "parameter"
        number, parameter = self.facts.get(name) or self._facts(name)
        again = self._is_again(name, variable)
        hidden = basis.work.hidden_of(name, variable.name if not stored else None) if parameter else 0.0
        key = (number, id(source_codes), id(target_codes), count, stored, again, hidden)
        if key not in self.joined:
            self.known.keep += [source_codes, target_codes]
            value, aside, each = self._table(name, source, source_codes, target, target_codes, count), None, None
            if parameter:
                aside, each = self._handled(name, source_codes, target_codes, count, further=not stored)
                bare = value
                self.known.keep += [bare, aside]
                value = self.known.once(("sum", id(bare), id(aside)), lambda: bare + aside)
            self.joined[key] = _Joined(value=value, aside=aside, each=each)
        return self.joined[key]

    def _is_again(self, name: str, target: Variable) -> bool:
        """Whether a redistribution is done again in the backward pass, with the operator behind it: of a fan-out, the first reader."""
        if target.what == "operator":
            return target.name in self.basis.again
        reader = self.basis.analysis.readers[name][0][0]
        return reader >= 0 and self.basis.graph.operators[reader].name in self.basis.again

    def _facts(self, name: str) -> tuple[int, bool]:
        """A number for all of a tensor that tables depend on, and whether it is a parameter."""
        basis, tensor = self.basis, self.basis.graph.tensors[name]
        parameter = tensor.role is Role.PARAMETER
        key = ("tensor", id(basis.spaces[name]), tensor.shape, tensor.dtype, parameter, tensor.trainable, name in basis.analysis.gradients)
        self.facts[name] = self.known.once(key, lambda: len(self.known.parts)), parameter
        return self.facts[name]

    def _table(self, name: str, source: int, source_codes: Ints, target: int, target_codes: Ints, count: int) -> Floats:
        basis, work = self.basis, self.basis.work
        tensor, space, variable = basis.graph.tensors[name], basis.spaces[name], self.variables[target]
        trained = name in basis.analysis.gradients
        stored = self.variables[source].what == "parameter"
        from_storage, hidden = stored and trained, work.hidden_of(name, variable.name if not stored else None)
        again = self._is_again(name, variable)
        ahead, back = work.of_parameters(hidden) if tensor.role is Role.PARAMETER else work.of_values(again)
        # Tables that differ only by a common factor are made once, and multiplied.
        scale = back or 1.0
        often, exposed = (ahead / scale, back / scale), work.once * (1 - hidden) / scale
        known = self.known.of_parameters or self.known if tensor.role is Role.PARAMETER else self.known
        links = (work.busy, work.beside) if tensor.role is Role.PARAMETER else None
        wider = basis.wider(tensor)
        key = ("distances", id(space), tensor.shape, tensor.bytes, wider, trained, from_storage, often, exposed, work.waits, links)

        def table() -> Floats:
            prices = self._distances(known, tensor, space, often)
            if from_storage:
                summed = basis.types.reduced_bytes(tensor)
                rows = prices.rows_from_storage(source_codes, partial(self._unit_lines, tensor), summed, exposed)
            else:
                rows = prices.rows(source_codes)
            return np.ascontiguousarray(rows[:, target_codes])

        lasts = known is not self.known
        codes = tuple(self.known.lasting(some) if lasts else id(some) for some in (source_codes, target_codes))
        return known.once((key, codes, scale * count), lambda: scale * count * known.once((key, codes), table))

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
        """The distances between layouts of a tensor; tensors with equal bytes and equal valid layouts share them."""
        basis = self.basis
        gradient, wider, stored = tensor.name in basis.analysis.gradients, basis.wider(tensor), tensor.role is Role.PARAMETER
        waits = 0.0 if stored else basis.work.waits

        def lines(kind: str, axes: Axes) -> tuple[Line, ...]:
            found = self._unit_lines(tensor, kind, axes) if stored else basis.prices.lines(kind, axes)
            return tuple((alpha + waits, beta) for alpha, beta in found) if waits else found

        def make() -> Distances:
            return Distances(space, tensor.shape, tensor.bytes, lines, gradient=gradient, often=often, wider=wider)

        valid = space.valid(tensor.shape).tobytes()
        links = (basis.work.busy, basis.work.beside) if stored else None
        return known.once(("reach", id(space), tensor.bytes, wider, gradient, stored, often, waits, valid, links), make)

    def _unit_lines(self, tensor: Tensor, kind: str, axes: Axes) -> tuple[Line, ...]:
        """The line of a parameter's part of a message, as far as the link counts that it is sent over."""
        prices, work = self.basis.prices, self.basis.work
        found = prices.unit_lines(kind, axes, tensor.bytes)
        if work.busy in ("", prices.link(axes)):
            return found
        return tuple((work.beside * alpha, work.beside * beta) for alpha, beta in found)
