"""Redistribution between two layouts as the cheapest chain of single-axis steps, with its gradient.

On one axis the step from one kind to another costs these collectives (n: local bytes before, p: degree):

    R → B   backward all-reduce n            S → R   forward all-gather n p
    R → S   slice, backward all-gather n     S → B   forward all-gather n p, backward reduce-scatter n p
    B → R, B → S   -                         S → S'  forward and backward all-to-all n
    P → R   forward all-reduce n             P → S   forward reduce-scatter n, backward all-gather n
    P → B   forward and backward all-reduce n        R, B, S → P   -

With several axes the order matters (slice first, gather last), so a chain is a shortest path over layouts (Dijkstra).
On one dim, splits with equal parts nest in axis order: only the innermost can be undone or added.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .layout import B, Kind, Layout, P, Placement, R, S, is_valid


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective of a step: `scale` times the local bytes before the step is its size."""

    collective: str
    scale: int


_NONE: tuple[Transfer | None, Transfer | None] = (None, None)


@lru_cache(maxsize=1 << 12)
def transfers(before: Placement, after: Placement, degree: int) -> tuple[Transfer | None, Transfer | None]:
    """The forward and backward collectives of a single-axis step.

    Sizes follow each collective's convention: all-reduce and all-to-all the buffer, all-gather what comes out,
    reduce-scatter what goes in.

    >>> from .layout import P, S
    >>> [str(t.collective) if t else None for t in transfers(P, S(0), 4)]
    ['reduce_scatter', 'all_gather']
    """
    kinds = before.kind, after.kind
    split, whole, share, partial = Kind.SPLIT, Kind.REPLICATED, Kind.BROADCAST, Kind.PARTIAL
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


def is_step(before: Layout, after: Layout, axis: int) -> bool:
    """Whether the layouts differ on `axis` only, in a way that one collective (or none) can do."""
    if any(b != a for i, (b, a) in enumerate(zip(before, after, strict=True)) if i != axis) or before[axis] == after[axis]:
        return False
    source, target = before[axis], after[axis]
    if source.kind is Kind.SPLIT and target.kind is Kind.SPLIT and source.dim == target.dim:
        return False
    if target.kind is Kind.PARTIAL and target.reduction != "sum":
        return False
    return all(inner != end for end in (source, target) if end.kind is Kind.SPLIT for inner in before[axis + 1 :])


def steps_from(layout: Layout, kinds: Sequence[Placement], shape: Sequence[int], mesh: Sequence[int]) -> tuple[tuple[int, Layout], ...]:
    """Every layout one step away, with the axis of the step."""
    return _steps_from(layout, tuple(kinds), tuple(shape), tuple(mesh))


@lru_cache(maxsize=1 << 15)
def _steps_from(
    layout: Layout, kinds: tuple[Placement, ...], shape: tuple[int, ...], mesh: tuple[int, ...]
) -> tuple[tuple[int, Layout], ...]:
    """Searches of chains come by the same layouts again and again."""
    changed = ((axis, (*layout[:axis], kind, *layout[axis + 1 :])) for axis in range(len(layout)) for kind in kinds)
    return tuple((axis, after) for axis, after in changed if is_step(layout, after, axis) and is_valid(after, shape, mesh))


ChainFinder = Callable[[Layout, Layout], tuple[tuple[Layout, ...], float]]
StepPrice = Callable[[str, int, int], float]
"""Seconds of a collective, given its name, its mesh axis and its bytes."""


def local_bytes(layout: Layout, nbytes: int, mesh: Sequence[int]) -> int:
    """Bytes of a shard of a tensor of `nbytes`."""
    return nbytes // math.prod(mesh[a] for a, p in enumerate(layout) if p.kind is Kind.SPLIT)


def step_price(before: Layout, after: Layout, axis: int, nbytes: int, mesh: Sequence[int], price: StepPrice, gradient: bool) -> float:
    """Seconds of one step, forward and (with a gradient) backward."""
    size = local_bytes(before, nbytes, mesh)
    forward, backward = transfers(before[axis], after[axis], mesh[axis])
    total = price(forward.collective, axis, forward.scale * size) if forward else 0.0
    if backward and gradient:
        total += price(backward.collective, axis, backward.scale * size)
    return total


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
) -> tuple[Layout, ...]:
    """Layouts from `source` to `target` (both included), each one step from the last, at the least price.

    The layouts in between take their placements from both ends and from `kinds` (default: splits of any dim, R, B, P).

    >>> from .layout import format_layout, parse_layout
    >>> flat = lambda kind, axis, nbytes: 1e-6 + nbytes * 1e-9
    >>> chain = cheapest_chain(parse_layout("S0 S0"), parse_layout("R S0"), (8, 8), 4, (2, 2), flat, gradient=False)
    >>> [format_layout(layout) for layout in chain]
    ['S0 S0', 'S0 R', 'R R', 'R S0']
    """
    if not gradient:
        source, target = without_gradient(source), without_gradient(target)
    nbytes = math.prod(shape) * itemsize
    between = kinds or (R, B, P, *(S(dim) for dim in range(len(shape))))
    kinds = tuple(dict.fromkeys(p for p in (*between, *source, *target) if gradient or p.kind is not Kind.BROADCAST))
    best: dict[Layout, float] = {source: 0.0}
    came: dict[Layout, Layout] = {}
    heap: list[tuple[float, int, Layout]] = [(0.0, 0, source)]
    counter = 1
    while heap:
        cost, _, layout = heapq.heappop(heap)
        if layout == target:
            break
        if cost > best[layout]:
            continue
        for axis, after in steps_from(layout, kinds, shape, mesh):
            # No chain makes a whole value partial only to sum it again.
            if layout[axis].kind is Kind.PARTIAL and source[axis].kind is not Kind.PARTIAL:
                continue
            fresh = cost + step_price(layout, after, axis, nbytes, mesh, price, gradient) + STEP_PENALTY
            if fresh < best.get(after, math.inf):
                best[after] = fresh
                came[after] = layout
                heapq.heappush(heap, (fresh, counter, after))
                counter += 1
    chain = [target]
    while chain[-1] != source:
        chain.append(came[chain[-1]])
    return tuple(reversed(chain))


def chain_price(chain: Sequence[Layout], nbytes: int, mesh: Sequence[int], price: StepPrice, *, gradient: bool) -> float:
    """Seconds of all steps of a chain, with their penalties."""
    pairs = [(before, after, changed_axis(before, after)) for before, after in itertools.pairwise(chain)]
    return sum(step_price(b, a, axis, nbytes, mesh, price, gradient) + STEP_PENALTY for b, a, axis in pairs)


def parameter_chain(
    source: Layout, target: Layout, chain: ChainFinder, share: StepPrice, nbytes: int, mesh: Sequence[int]
) -> tuple[Layout, ...]:
    """The cheapest chain from a parameter's storage to `target`.

    Leading R → B steps cost only `share`, the price as part of a gradient bucket. `chain` finds the cheapest ordinary
    chain between two layouts, and its price.
    """
    best: tuple[float, tuple[Layout, ...]] = (math.inf, ())
    for lead in leading_shares(source):
        at, price, steps = source, 0.0, [source]
        for axis in lead:
            price += share("all_reduce", axis, local_bytes(source, nbytes, mesh)) + STEP_PENALTY
            at = (*at[:axis], B, *at[axis + 1 :])
            steps.append(at)
        rest, cost = chain(at, target)
        if price + cost < best[0]:
            best = (price + cost, (*steps, *rest[1:]))
    return best[1]


def leading_shares(source: Layout) -> list[tuple[int, ...]]:
    """Every set of axes on which a stored parameter is replicated, so that it may turn to B there at once."""
    whole = [axis for axis, placement in enumerate(source) if placement.kind is Kind.REPLICATED]
    return [lead for count in range(len(whole) + 1) for lead in itertools.combinations(whole, count)]


def without_gradient(layout: Layout) -> Layout:
    """The layout of a tensor that carries no gradient: R and B are one."""
    return tuple(R if placement.kind is Kind.BROADCAST else placement for placement in layout)


def changed_axis(before: Layout, after: Layout) -> int:
    """The axis on which two neighbours in a chain differ."""
    return next(axis for axis, (b, a) in enumerate(zip(before, after, strict=True)) if b != a)
