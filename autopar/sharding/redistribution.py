"""Redistribution between two layouts as the cheapest chain of steps, with its gradient.

A step over a mesh axis, or over several at once as one group, from one kind to another, costs these
collectives (n: local bytes before, p: devices of the group):

    R → B   backward all-reduce n            S → R   forward all-gather n p
    R → S   slice, backward all-gather n     S → B   forward all-gather n p, backward reduce-scatter
            n p
    B → R, B → S   -                         S → S'  forward and backward all-to-all n
    P → R   forward all-reduce n             P → S   forward reduce-scatter n, backward all-gather n
    P → B   forward and backward all-reduce n        R, B, S → P   -

The order of steps matters (slice first, gather last), so a chain is a shortest path over layouts
(Dijkstra). On one dim, splits with equal parts nest in axis order: only the innermost can be undone
or added. A step over several axes has one kind before and one behind on all of them, so its group,
in row-major order, has the parts in their order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .layout import B, Kind, Layout, P, Placement, R, S, is_valid
from .mesh import Axes, axis_sets, degree_of


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective of a step: `scale` times the local bytes before the step is its size."""

    collective: str
    scale: int


_NONE: tuple[Transfer | None, Transfer | None] = (None, None)


@lru_cache(maxsize=1 << 12)
def transfers(
    before: Placement, after: Placement, degree: int
) -> tuple[Transfer | None, Transfer | None]:
    """The forward and backward collectives of a single-axis step.

    Sizes follow each collective's convention: all-reduce and all-to-all the buffer, all-gather what
    comes out, reduce-scatter what goes in.

    >>> from .layout import P, S
    >>> [str(t.collective) if t else None for t in transfers(P, S(0), 4)]
    ['reduce_scatter', 'all_gather']
    """
    kinds = before.kind, after.kind
    split = Kind.SPLIT
    whole = Kind.REPLICATED
    share = Kind.BROADCAST
    partial = Kind.PARTIAL
    # Nothing is sent: at most, one rank keeps its value or its gradient for the whole group.
    if before == after or kinds in ((share, whole), (share, split)) or after.kind is partial:
        return _NONE
    table: dict[tuple[Kind, Kind], tuple[Transfer | None, Transfer | None]] = {
        (whole, share): (None, Transfer("all_reduce", 1)),
        (whole, split): (None, Transfer("all_gather", 1)),
        (split, whole): (Transfer("all_gather", degree), None),
        (split, share): (Transfer("all_gather", degree), Transfer("reduce_scatter", degree)),
        (split, split): (Transfer("all_to_all", 1), Transfer("all_to_all", 1)),
        (partial, whole): (Transfer("all_reduce", 1), None),
        (partial, split): (Transfer("reduce_scatter", 1), Transfer("all_gather", 1)),
        (partial, share): (Transfer("all_reduce", 1), Transfer("all_reduce", 1)),
    }
    return table[kinds]


class Change(NamedTuple):
    """A step of a chain: its axes, the placements before and after it, and its devices."""

    axes: Axes
    before: Placement
    after: Placement
    degree: int

    @property
    def transfers(self) -> tuple[Transfer | None, Transfer | None]:
        """The forward and backward collectives."""
        return transfers(self.before, self.after, self.degree)


# The chains of a model consist of a few steps, which every room looks at again.
@lru_cache(maxsize=1 << 12)
def changed_axes(before: Layout, after: Layout) -> Axes:
    """The axes on which two neighbours in a chain differ."""
    return tuple(axis for axis, (b, a) in enumerate(zip(before, after, strict=True)) if b != a)


def change(before: Layout, after: Layout, mesh: Sequence[int]) -> Change:
    """The step between two neighbours in a chain."""
    return _change(before, after, tuple(mesh))


@lru_cache(maxsize=1 << 12)
def _change(before: Layout, after: Layout, mesh: tuple[int, ...]) -> Change:
    axes = changed_axes(before, after)
    return Change(axes, before[axes[0]], after[axes[0]], degree_of(axes, mesh))


def may_change(before: Placement, after: Placement) -> bool:
    """Whether any step leads from one kind to another.

    Splits of one dim do not change into one another.
    """
    same_dim = before.kind is Kind.SPLIT and after.kind is Kind.SPLIT and before.dim == after.dim
    return not same_dim and not (after.kind is Kind.PARTIAL and after.reduction != "sum")


def is_step(before: Layout, after: Layout) -> bool:
    """Whether one collective, or none, leads from one layout to the other.

    They then differ on one axis, or alike on several.
    """
    axes = changed_axes(before, after)
    if not axes or len({(before[axis], after[axis]) for axis in axes}) > 1:
        return False
    return _may_become(before, axes, after[axes[0]])


def _may_become(layout: Layout, axes: Axes, target: Placement) -> bool:
    """Whether a layout may change to another placement on axes on which it is the same."""
    source = layout[axes[0]]
    if not may_change(source, target):
        return False
    # An axis further in that is split alike nests inside this one, and would have to go first.
    ends = [end for end in (source, target) if end.kind is Kind.SPLIT]
    return not ends or not any(
        layout[axis] in ends for axis in range(axes[0] + 1, len(layout)) if axis not in axes
    )


def steps_from(
    layout: Layout, kinds: Sequence[Placement], shape: Sequence[int], mesh: Sequence[int]
) -> tuple[tuple[Axes, Layout], ...]:
    """Every layout one step away, with the axes of the step."""
    return _steps_from(layout, tuple(kinds), tuple(shape), tuple(mesh))


@lru_cache(maxsize=1 << 15)
def _steps_from(
    layout: Layout, kinds: tuple[Placement, ...], shape: tuple[int, ...], mesh: tuple[int, ...]
) -> tuple[tuple[Axes, Layout], ...]:
    """Searches of chains come by the same layouts again and again."""
    changed = (
        (axes, _with(layout, axes, kind))
        for axes in _alike(layout, mesh)
        for kind in kinds
        if kind != layout[axes[0]] and _may_become(layout, axes, kind)
    )
    return tuple((axes, after) for axes, after in changed if is_valid(after, shape, mesh))


def _alike(layout: Layout, mesh: Sequence[int]) -> Iterator[Axes]:
    """Every axis, and every set of axes on which the layout is the same."""
    for axes in axis_sets(mesh):
        if all(layout[axis] == layout[axes[0]] for axis in axes):
            yield axes


def _with(layout: Layout, axes: Axes, kind: Placement) -> Layout:
    return tuple(kind if axis in axes else placement for axis, placement in enumerate(layout))


ChainFinder = Callable[[Layout, Layout], tuple[tuple[Layout, ...], float]]
StepPrice = Callable[[str, Axes, int], float]
"""Seconds of a collective, given its name, its mesh axes and its bytes."""
Often = tuple[float, float]
"""How often a value goes along a chain, and its gradient comes back."""
ONCE: Often = (1.0, 1.0)


def local_bytes(layout: Layout, nbytes: int, mesh: Sequence[int]) -> int:
    """Bytes of a shard of a tensor of `nbytes`."""
    return nbytes // math.prod(mesh[a] for a, p in enumerate(layout) if p.kind is Kind.SPLIT)


def step_price(
    before: Layout, after: Layout, nbytes: int, mesh: Sequence[int], price: StepPrice, often: Often
) -> float:
    """Seconds of one step, forward and backward."""
    return _change_price(
        change(before, after, mesh), local_bytes(before, nbytes, mesh), price, often
    )


def _change_price(step: Change, size: int, price: StepPrice, often: Often) -> float:
    """Seconds of a step from shards of `size` bytes."""
    return sum(
        times * price(transfer.collective, step.axes, transfer.scale * size)
        for times, transfer in zip(often, step.transfers, strict=True)
        if transfer and times
    )


STEP_PENALTY = 1e-9
"""Seconds added to every step, so that among equal prices the shortest chain wins."""


def cheapest_chain(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    itemsize: int,
    mesh: Sequence[int],
    price: StepPrice,
    *,
    gradient: bool,
    kinds: Sequence[Placement] = (),
    apart: bool = False,
    often: Often = ONCE,
) -> tuple[Layout, ...]:
    """Layouts from `source` to `target`, both included, each one step from the last.

    The chain has the least price. Without a `gradient` nothing comes back.

    The layouts in between take their placements from both ends and from `kinds` (default: splits of
    any dim, R, B, P). `apart`: no step is over several axes.

    >>> from .layout import format_layout, parse_layout
    >>> flat = lambda kind, axis, nbytes: 1e-6 + nbytes * 1e-9
    >>> ends = parse_layout("S0 S0"), parse_layout("R S0")
    >>> chain = cheapest_chain(*ends, (8, 8), 4, (2, 2), flat, gradient=False)
    >>> [format_layout(layout) for layout in chain]
    ['S0 S0', 'R R', 'R S0']
    """
    if not gradient:
        source = without_gradient(source)
        target = without_gradient(target)
        often = (often[0], 0.0)
    nbytes = math.prod(shape) * itemsize
    between = kinds or (R, B, P, *(S(dim) for dim in range(len(shape))))
    every = dict.fromkeys((*between, *source, *target))
    kinds = tuple(p for p in every if gradient or p.kind is not Kind.BROADCAST)
    best: dict[Layout, float] = {source: 0.0}
    came: dict[Layout, Layout] = {}
    # Layouts have no order. The counter breaks ties, the same way in every run.
    heap: list[tuple[float, int, Layout]] = [(0.0, 0, source)]
    counter = 1
    while heap:
        cost, _, layout = heapq.heappop(heap)
        if layout == target:
            break
        # A cheaper way to this layout was found after the entry was pushed.
        if cost > best[layout]:
            continue
        size = local_bytes(layout, nbytes, mesh)
        for axes, after in steps_from(layout, kinds, shape, mesh):
            if (apart and len(axes) > 1) or _sums_in_vain(source, layout, axes):
                continue
            step = Change(axes, layout[axes[0]], after[axes[0]], degree_of(axes, mesh))
            fresh = cost + _change_price(step, size, price, often) + STEP_PENALTY
            # No way over a layout as far off as the target leads to it sooner.
            if fresh < min(best.get(after, math.inf), best.get(target, math.inf)):
                best[after] = fresh
                came[after] = layout
                heapq.heappush(heap, (fresh, counter, after))
                counter += 1
    return _chain_back(came, source, target)


def _chain_back(
    came: Mapping[Layout, Layout], source: Layout, target: Layout
) -> tuple[Layout, ...]:
    """The layouts from `source` to `target`, by the one that each came from."""
    chain = [target]
    while chain[-1] != source:
        chain.append(came[chain[-1]])
    return tuple(reversed(chain))


def _sums_in_vain(source: Layout, layout: Layout, axes: Axes) -> bool:
    """Whether a step sums over axes on which the source was whole or split, and no sum was due."""
    return layout[axes[0]].kind is Kind.PARTIAL and any(
        source[axis].kind is not Kind.PARTIAL for axis in axes
    )


def chain_price(
    chain: Sequence[Layout],
    nbytes: int,
    mesh: Sequence[int],
    price: StepPrice,
    *,
    gradient: bool,
    often: Often = ONCE,
) -> float:
    """Seconds of all steps of a chain, with their penalties."""
    times = often if gradient else (often[0], 0.0)
    return sum(
        step_price(b, a, nbytes, mesh, price, times) + STEP_PENALTY
        for b, a in itertools.pairwise(chain)
    )


def parameter_chain(
    source: Layout,
    target: Layout,
    chain: ChainFinder,
    share: StepPrice,
    nbytes: int,
    mesh: Sequence[int],
) -> tuple[Layout, ...]:
    """The cheapest chain from a parameter's storage to `target`.

    A leading R → B step costs only `share`, the price as part of a gradient bucket, once a step.
    `chain` finds the cheapest ordinary chain between two layouts, and its price.
    """
    rest, cost = chain(source, target)
    best = cost, rest
    # In a bucket R → B costs less than alone. Dijkstra's prices do not depend on what came before,
    # so every such start is tried by itself.
    for lead in leading_shares(source, mesh):
        price = share("all_reduce", lead, local_bytes(source, nbytes, mesh)) + STEP_PENALTY
        rest, cost = chain(_with(source, lead, B), target)
        if price + cost < best[0]:
            best = price + cost, (source, *rest)
    return best[1]


def leading_shares(source: Layout, mesh: Sequence[int]) -> list[Axes]:
    """Every set of axes on which a stored parameter is replicated and may turn to B in one step."""
    return [
        lead
        for lead in axis_sets(mesh)
        if all(source[axis].kind is Kind.REPLICATED for axis in lead)
    ]


def without_gradient(layout: Layout) -> Layout:
    """The layout of a tensor that carries no gradient: R and B are one."""
    return tuple(R if placement.kind is Kind.BROADCAST else placement for placement in layout)
