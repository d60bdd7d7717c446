"""The seconds of redistributing values from each choice of a maker to each of a reader, for any multiplicities by one product.

    seconds = n c d        n: equal joins, c: how often a micro-batch counts, d: forward and backward, once

The arrays hold the tables of all joins, one behind the other, those of equal joins once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.cluster.measured import Line
from autopar.costmodel.step.distances import Distances

from ..ir import Role
from ..sharding.mesh import Axes
from .multiplicities import Multiplicities
from .outline import Join, Outline
from .tables import Basis, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTables:
    """Arrays [entries of all tables]: `counts` n, `seconds` d.

    `spans`, `shapes`: of each class of equal joins, its part of the arrays, and its table's shape, the earlier variable first.
    `class_of`: by the number of a join.
    """

    counts: Floats
    seconds: Floats
    spans: tuple[slice, ...]
    shapes: tuple[tuple[int, int], ...]
    class_of: Mapping[int, int]

    def priced(self, work: Multiplicities) -> list[Floats]:
        """The table of each class."""
        seconds = (self.counts * (work.counted or 1.0)) * self.seconds
        return [seconds[span].reshape(shape) for span, shape in zip(self.spans, self.shapes, strict=True)]


def value_tables(basis: Basis, outline: Outline) -> ValueTables:
    """The tables of an outline's joins of values, with the recomputed segments, and the waits, of the basis."""
    classes, class_of = dict[object, int](), dict[int, int]()
    counts: list[int] = []
    tables: list[Floats] = []
    for number, join in enumerate(outline.joins):
        tensor = basis.graph.tensors[join.tensor]
        if tensor.role is Role.PARAMETER:
            continue
        again, turned = _is_again(basis, outline, join), join.source > join.target
        facts = (id(basis.spaces[join.tensor]), tensor.shape, tensor.bytes, basis.wider(tensor), join.tensor in basis.analysis.gradients)
        key = (facts, id(join.source_codes), id(join.target_codes), join.count, again, turned)
        if key not in classes:
            classes[key] = len(tables)
            table = _distances(basis, join, again).rows(join.source_codes)[:, join.target_codes]
            tables.append(np.ascontiguousarray(table.T if turned else table))
            counts.append(join.count)
        class_of[number] = classes[key]
    ends = np.cumsum([0, *(table.size for table in tables)]).tolist()
    return ValueTables(
        counts=np.repeat(np.array(counts, dtype=np.float64), [table.size for table in tables]),
        seconds=np.concatenate([table.ravel() for table in tables]) if tables else np.zeros(0),
        spans=tuple(map(slice, ends[:-1], ends[1:])), shapes=tuple((len(table), table.shape[1]) for table in tables), class_of=class_of,
    )  # fmt: skip


def _is_again(basis: Basis, outline: Outline, join: Join) -> bool:
    """Whether a redistribution is done again in the backward pass, with the operator behind it: of a fan-out, the first reader."""
    target = outline.variables[join.target]
    if target.what == "operator":
        return target.name in basis.again
    reader = basis.analysis.readers[join.tensor][0][0]
    return reader >= 0 and basis.graph.operators[reader].name in basis.again


def _distances(basis: Basis, join: Join, again: bool) -> Distances:
    """The distances between layouts of a value; those of equal bytes and equal valid layouts are one."""
    tensor, space, work = basis.graph.tensors[join.tensor], basis.spaces[join.tensor], basis.work
    gradient, wider, waits = join.tensor in basis.analysis.gradients, basis.wider(tensor), work.waits
    often = (2.0 if again else 1.0, 1.0) if work.counted else (0.0, 0.0)

    def lines(kind: str, axes: Axes) -> tuple[Line, ...]:
        found = basis.prices.lines(kind, axes)
        return tuple((alpha + waits, beta) for alpha, beta in found) if waits else found

    def make() -> Distances:
        return Distances(space, tensor.shape, tensor.bytes, lines, gradient=gradient, often=often, wider=wider)

    key = ("values' distances", id(space), tensor.bytes, wider, gradient, often, waits, space.valid(tensor.shape).tobytes())
    return basis.known.once(key, make)
