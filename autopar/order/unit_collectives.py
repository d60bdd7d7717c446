"""The rounds of a unit: collectives that gather its parameters, or reduce their gradients.

The members of a group travel in one message, so each step of a group is one collective, and a group
is a chain of collectives. In a round every chain under way issues its next collective, so that
groups travel side by side. A gather's chains end together, in the last round before the first
reader; a reduction's begin together, in the first one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.sharding.mesh import degree_of
from autopar.sharding.program import (
    Bucket,
    Collective,
    Program,
    Redistribute,
    chain_collectives,
    moves_value,
    only_casts,
    summed_scales,
)
from autopar.sharding.redistribution import change
from autopar.sharding.schedule import PLAIN, Types

from .units import Mode, Unit
from .value_flow import PlacedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A group or a bucket of a unit on its way.

    `begins`: the round of its first collective. `count`: its collectives. `group`: the members of a
    group. `buckets`: else a bucket, or the two of low-rank factors.
    """

    begins: int
    count: int
    group: tuple[int, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    @property
    def ends(self) -> int:
        """The first round in which it issues nothing more; without collectives it takes one."""
        return self.begins + max(self.count, 1)


class UnitChains:
    """The chains of the units of a plan, each made once, as every step sends the same."""

    def __init__(self, program: Program, units: Sequence[Unit]) -> None:
        self._program = program
        self._units = units
        self._gathers: dict[int, tuple[Chain, ...]] = {}
        self._reductions: dict[tuple[int, bool], tuple[Chain, ...]] = {}

    def gather(self, unit: int) -> tuple[Chain, ...]:
        """The chains of a unit's gather."""
        if unit not in self._gathers:
            self._gathers[unit] = gather_chains(self._program, self._units[unit])
        return self._gathers[unit]

    def reduction(self, unit: int, *, last: bool) -> tuple[Chain, ...]:
        """The chains of a unit's reduction, in the `last` micro-batch or an earlier one."""
        # Sums of gradients that are added up over the step are sent in the last micro-batch alone.
        if (unit, last) not in self._reductions:
            chains = reduce_chains(self._program, self._units[unit], last=last)
            self._reductions[unit, last] = chains
        return self._reductions[unit, last]


def rounds_of(chains: Sequence[Chain]) -> int:
    """The rounds in which these chains are issued."""
    return max((chain.ends for chain in chains), default=0)


def gather_chains(program: Program, unit: Unit) -> tuple[Chain, ...]:
    """The groups of a gather; those that start from others' results come behind them."""
    chains: list[Chain] = []
    ends = 0
    for layer in _layers(program, unit.groups, moves_value):
        counts = {group: _talking(program, group)[0] for group in layer}
        # A layer of casts or cuts takes a round, too: what starts from it waits for all of it.
        ends += max(1, *counts.values())
        chains += (
            Chain(begins=ends - max(count, 1), count=count, group=group)
            for group, count in counts.items()
        )
    return tuple(chains)


def reduce_chains(program: Program, unit: Unit, *, last: bool) -> tuple[Chain, ...]:
    """The groups of a reduction from the last one back, then the sums of a step's `last` one."""
    chains: list[Chain] = []
    groups = unit.groups if last or unit.mode is not Mode.ONCE else ()
    for layer in reversed(_layers(program, groups, _leads)):
        begins = _sent(chains)
        chains += (
            Chain(begins=begins, count=_talking(program, group)[1], group=group)
            for group in reversed(layer)
        )
    mesh = program.assignment.mesh.shape
    begins = _sent(chains)
    for buckets in _together(unit.buckets) if last else ():
        sums = [axes for bucket in buckets for axes in bucket.sums if degree_of(axes, mesh) > 1]
        chains.append(Chain(begins=begins, count=len(sums), buckets=buckets))
    return tuple(chains)


def _sent(chains: Sequence[Chain]) -> int:
    """The first round that may begin behind these chains; what sends nothing is over at once."""
    return max((chain.begins + chain.count for chain in chains), default=0)


def _together(buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, ...]]:
    """The buckets one by one, and those of low-rank factors in pairs."""
    for number, bucket in enumerate(buckets):
        # The second factors are made of the sums of the first.
        if bucket.factor < 2:
            yield tuple(buckets[number : number + 1 + bucket.factor])


def _layers(
    program: Program, groups: Sequence[tuple[int, ...]], travels: Callable[[Redistribute], bool]
) -> list[list[tuple[int, ...]]]:
    """The groups that travel, in layers: those of a later one start from results of earlier ones.

    A cast is no earlier result, as what starts behind it casts the shard itself.
    """
    layer_of: dict[PlacedValue, int] = {}
    layers: list[list[tuple[int, ...]]] = []
    for group in groups:
        steps = (program.steps[index] for index in group)
        moves = [step for step in steps if isinstance(step, Redistribute)]
        if not travels(moves[0]):
            continue
        layer = max(layer_of.get((move.tensor, move.chain[0]), -1) + 1 for move in moves)
        if _leads(moves[0]):
            layer_of.update(((move.tensor, move.chain[-1]), layer) for move in moves)
        layers += [[]] * (layer == len(layers))
        layers[layer] = [*layers[layer], group]
    return layers


def _leads(step: Redistribute) -> bool:
    return not only_casts(step)


def _talking(program: Program, group: Sequence[int]) -> tuple[int, int]:
    """The collectives of a group's gather and of its reduction, of several ranks each."""
    step = program.steps[group[0]]
    assert isinstance(step, Redistribute)
    mesh = program.assignment.mesh.shape
    ahead = len(summed_scales(program.graph, step, mesh))
    back = 0
    for number, (before, after) in enumerate(itertools.pairwise(step.chain)):
        moved = change(before, after, mesh)
        if moved.degree > 1:
            ahead += moved.transfers[0] is not None
            back += bool(moved.transfers[1] and step.gradient and number >= step.bucketed)
    return ahead, back


def gather_rounds(program: Program, chains: Sequence[Chain]) -> list[list[Collective]]:
    """The collectives of each round of a gather."""
    return _by_round((chain, _joined(program, chain.group, PLAIN.types)[0]) for chain in chains)


def reduce_rounds(
    program: Program, chains: Sequence[Chain], types: Types
) -> list[list[Collective]]:
    """The collectives of each round of a reduction."""
    mesh = program.assignment.mesh.shape
    return _by_round(
        (
            chain,
            # The way back undoes the chain from its end.
            _joined(program, chain.group, types)[1][::-1] if chain.group else _sums(chain, mesh),
        )
        for chain in chains
    )


def _by_round(chains: Iterator[tuple[Chain, list[Collective]]]) -> list[list[Collective]]:
    issued: list[list[Collective]] = []
    for chain, collectives in chains:
        issued += [[] for _ in range(chain.ends - len(issued))]
        for number, collective in enumerate(collectives):
            issued[chain.begins + number].append(collective)
    return issued


def _sums(chain: Chain, mesh: Sequence[int]) -> list[Collective]:
    sums = [
        Collective(
            phase="backward",
            kind="all_reduce",
            axes=axes,
            nbytes=bucket.nbytes,
            tensor=bucket.parameters[0],
        )
        for bucket in chain.buckets
        for axes in bucket.sums
    ]
    return _talk(sums, mesh)


def _joined(
    program: Program, group: Sequence[int], types: Types
) -> tuple[list[Collective], list[Collective]]:
    """The collectives of a group ahead and back, both in the order of the chain."""
    mesh = program.assignment.mesh.shape
    steps = (program.steps[index] for index in group)
    each = [
        chain_collectives(program.graph, step, mesh, types)
        for step in steps
        if isinstance(step, Redistribute)
    ]
    ahead, back = (
        # Members of a group take the same steps, so their k-th collectives are one message.
        [_message(joined) for joined in zip(*way, strict=True)]
        for way in zip(*each, strict=True)
    )
    return _talk(ahead, mesh), _talk(back, mesh)


def scale_messages(program: Program, group: Sequence[int]) -> list[Collective]:
    """The all-reduces of largest elements with which a group's gather begins."""
    step = program.steps[group[0]]
    assert isinstance(step, Redistribute)
    count = len(summed_scales(program.graph, step, program.assignment.mesh.shape))
    return _joined(program, group, PLAIN.types)[0][:count] if count else []


def _talk(collectives: Sequence[Collective], mesh: Sequence[int]) -> list[Collective]:
    return [c for c in collectives if degree_of(c.axes, mesh) > 1]


def _message(joined: Sequence[Collective]) -> Collective:
    first = joined[0]
    return Collective(
        phase=first.phase,
        kind=first.kind,
        axes=first.axes,
        nbytes=sum(collective.nbytes for collective in joined),
        tensor=first.tensor,
    )
