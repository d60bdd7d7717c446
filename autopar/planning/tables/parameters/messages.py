"""The latency of the messages in which a solution's parameters travel, beyond the tables' shares.

    late = sum over kinds k of  max( min(n, c_k) alpha_k - shares_k, 0 )

A kind is a collective over a set of mesh axes. Of n units each sends a message of every kind that
one of its parameters takes; c_k parameters take kind k. In the tables a parameter bears a share of
its message's latency alpha_k, by its bytes: a few small ones, of which every unit has some, so bear
hardly any. Each message is copied together by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir import Tensor
from autopar.planning.space import Multiplicities
from autopar.planning.tables.tables import Tables, Variable
from autopar.search import Solution
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.mesh import Axes, degree_of
from autopar.sharding.redistribution import local_bytes

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Seconds of latency that the tables leave out, and the number of all messages."""

    gathers: float
    reductions: float
    count: float


def messages(tables: Tables, solution: Solution, work: Multiplicities, units: int) -> Messages:
    """The messages of a solution's parameters in so many units."""
    taken: dict[tuple[str, Axes], list[tuple[Tensor, float, int]]] = {}
    for tensor, stored, used, count in _ways(tables, solution):
        for kind, axes, nbytes in _kinds(tables, tensor, stored, used):
            taken.setdefault((kind, axes), []).append((tensor, nbytes, count))
    ahead, back = work.gathers
    often = dict(zip(KINDS, (ahead, back, work.once), strict=True))
    late = dict.fromkeys(KINDS, 0.0)
    number = 0.0
    for (kind, axes), some in taken.items():
        # A unit without a parameter of this kind sends no such message.
        sent = min(units, sum(count for _, _, count in some))
        # The algorithm that is fastest for a full unit.
        alpha = min(
            tables.prices.lines(kind, axes),
            key=lambda line: line[0] + line[1] * tables.prices.unit_bytes,
        )
        # The tables gave each parameter a share of the latency already.
        shares = sum(
            count
            * (
                tables.prices.unit_seconds(kind, axes, int(nbytes), tensor.bytes)
                - alpha[1] * int(nbytes)
            )
            for tensor, nbytes, count in some
        )
        # It is never negative: a message has its latency, however it is shared.
        late[kind] += often[kind] * max(sent * alpha[0] - shares, 0.0)
        number += often[kind] * sent
    return Messages(
        gathers=late["all_gather"],
        reductions=late["reduce_scatter"] + late["all_reduce"],
        count=number,
    )


def _ways(tables: Tables, solution: Solution) -> Iterator[tuple[Tensor, Layout, Layout, int]]:
    """Trained parameters with their layouts in storage and in use, and how many are alike."""
    for u, v in tables.aside:
        source = tables.variables[u]
        target = tables.variables[v]
        tensor = tables.analysis.graph.tensors[source.name]
        if source.what == "parameter" and source.name in tables.analysis.gradients:
            stored = tables.spaces[source.name].layout(int(source.rows[solution.choices[u]]))
            yield (
                tensor,
                stored,
                _used(tables, target, source.name, solution.choices[v]),
                tables.counts.get(source.name, 1),
            )


def _used(tables: Tables, target: Variable, name: str, choice: int) -> Layout:
    """The layout in which a variable takes a parameter."""
    if target.what != "operator":
        return tables.spaces[name].layout(int(target.rows[choice]))
    # A parameter of several readers has a fan-out, so this operator is the only reader.
    operator, position = next(pair for pair in tables.analysis.readers[name] if pair[0] >= 0)
    reader = tables.analysis.graph.operators[operator].name
    return tables.strategies[reader].layouts(int(target.rows[choice]))[0][position]


def _kinds(
    tables: Tables, tensor: Tensor, stored: Layout, used: Layout
) -> Iterator[tuple[str, Axes, float]]:
    """The kinds of message that a parameter takes, with its bytes in them."""
    mesh = tables.prices.mesh.shape
    summed = tables.types.reduced_bytes(tensor)
    pairs = list(enumerate(zip(stored, used, strict=True)))
    gathered = tuple(
        axis
        for axis, (before, after) in pairs
        if before.kind is Kind.SPLIT and after.kind is not Kind.SPLIT
    )
    whole = tuple(
        axis
        for axis, (before, after) in pairs
        if before.kind is Kind.REPLICATED and after.kind is Kind.BROADCAST
    )
    if degree_of(gathered, mesh) > 1:
        yield "all_gather", gathered, local_bytes(used, tensor.bytes, mesh)
        if all(used[axis].kind is Kind.BROADCAST for axis in gathered):
            yield "reduce_scatter", gathered, local_bytes(used, summed, mesh)
    if degree_of(whole, mesh) > 1:
        yield "all_reduce", whole, local_bytes(stored, summed, mesh)
