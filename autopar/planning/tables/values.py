"""The seconds of redistributing values from a maker's choices to a reader's.

For any multiplicities one product gives all of them:

    seconds = n c d        n: equal joins, c: how often a micro-batch counts, d: forward and
                           backward, once

Equal joins have one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.cluster.measured_collectives import Line
from autopar.costmodel.redistribution.distances import Distances
from autopar.costmodel.redistribution.step_prices import Charges
from autopar.ir import Role
from autopar.planning.space import Multiplicities
from autopar.sharding.mesh import Axes

from .outline import Join, Outline
from .tables import Basis, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTables:
    """The `counts` n and `seconds` d of each class of equal joins.

    A table's first axis is the earlier variable. `class_of`: by the number of a join.
    """

    counts: tuple[int, ...]
    seconds: tuple[Floats, ...]
    class_of: Mapping[int, int]

    def priced(self, work: Multiplicities) -> list[Floats]:
        """The table of each class."""
        # A layout out of reach takes infinitely long, and 0 times infinity is not a number. Where
        # passes do not count, `_distances` made the other seconds 0 already.
        often = work.counted or 1.0
        return [
            (count * often) * seconds
            for count, seconds in zip(self.counts, self.seconds, strict=True)
        ]


def value_tables(basis: Basis, outline: Outline) -> ValueTables:
    """Return the tables of an outline's joins of values.

    The recomputed segments and the waits are those of the basis.
    """
    classes = dict[object, int]()
    class_of = dict[int, int]()
    counts: list[int] = []
    tables: list[Floats] = []
    for number, join in enumerate(outline.joins):
        tensor = basis.graph.tensors[join.tensor]
        if tensor.role is Role.PARAMETER:
            continue
        repeated = _is_repeated(basis, join)
        # A cost graph has its edges from the earlier variable to the later one.
        turned = join.source > join.target
        facts = (
            basis.spaces[join.tensor],
            tensor.shape,
            tensor.bytes,
            basis.types.wider(tensor),
            join.tensor in basis.analysis.gradients,
        )
        key = (facts, join.source_codes, join.target_codes, join.count, repeated, turned)
        # Equal joins are priced once; the search recognises their tables as one.
        if key not in classes:
            classes[key] = len(tables)
            table = _distances(basis, join, repeated).rows(join.source_codes.array)
            table = table[:, join.target_codes.array]
            tables.append(np.ascontiguousarray(table.T if turned else table))
            counts.append(join.count)
        class_of[number] = classes[key]
    return ValueTables(counts=tuple(counts), seconds=tuple(tables), class_of=class_of)


def _is_repeated(basis: Basis, join: Join) -> bool:
    """Whether a redistribution is done again in the backward pass, with the operator behind it.

    Of a fan-out the first reader is that operator.
    """
    if join.reader is not None:
        return join.reader in basis.recomputed
    reader = basis.analysis.readers[join.tensor][0][0]
    return reader >= 0 and basis.graph.operators[reader].name in basis.recomputed


def _distances(basis: Basis, join: Join, repeated: bool) -> Distances:
    """Return the distances between layouts of a value.

    Values of equal bytes and equal valid layouts share them.
    """
    tensor = basis.graph.tensors[join.tensor]
    space = basis.spaces[join.tensor]
    # Distances count a single micro-batch; the multiplicities are applied in `priced`.
    work = basis.work
    gradient = join.tensor in basis.analysis.gradients
    wider = basis.types.wider(tensor)
    waits = work.waits
    # A recomputed reader takes its inputs a second time.
    often = (2.0 if repeated else 1.0, 1.0) if work.counted else (0.0, 0.0)

    def lines(kind: str, axes: Axes) -> tuple[Line, ...]:
        pairs = basis.prices.lines(kind, axes)
        return tuple((alpha + waits, beta) for alpha, beta in pairs) if waits else pairs

    def make() -> Distances:
        charges = Charges(lines=lines, often=often, wider=wider)
        return Distances(space, tensor.shape, tensor.bytes, charges, gradient=gradient)

    key = (
        "values' distances",
        space,
        tensor.bytes,
        wider,
        gradient,
        often,
        waits,
        space.valid(tensor.shape).tobytes(),
    )
    # A tensor of half the bytes in half as many micro-batches has the same ones.
    return basis.known.on_mesh.once(key, make)
