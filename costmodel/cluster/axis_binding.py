"""The levels of a cluster that the axes of a mesh span, and their text.

A span is written "nvlink", or "nvlink:8+nic:2": 8 members in each unit of the inner level, and 2
such units.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable

from autopar.errors import ClusterError

from .cluster import Cluster
from .level import ALONE, Level


@functools.lru_cache(maxsize=4096)
def _bind(units: tuple[int, ...], names: tuple[str, ...], stride: int, size: int) -> str:
    """Text of the levels that an axis of `size` with `stride` spans."""
    if size == 1:
        return ALONE
    # The innermost level whose units hold whole groups; units of the outermost level always do.
    outer = next(i for i, unit in enumerate(units) if unit % (stride * size) == 0)
    # Members of a group in one unit of each inner level, if the group fills units evenly.
    inside = [max(unit // stride, 1) for unit in units[:outer]]
    even = all(
        max(unit, stride) % min(unit, stride) == 0 and size % held == 0
        for unit, held in zip(units, inside, strict=False)
    )
    # A ring or tree by levels needs equal branches; others are priced as if all members were apart.
    if not even:
        return names[outer]
    branches = [after // before for before, after in itertools.pairwise([1, *inside, size])]
    return _span_text(zip(names, branches, strict=False))


def _span_text(branches: Iterable[tuple[str, int]]) -> str:
    """Text of levels with their branches, inside out."""
    spanned = [(name, count) for name, count in branches if count > 1]
    return (
        spanned[0][0]
        if len(spanned) == 1
        else "+".join(f"{name}:{count}" for name, count in spanned) or ALONE
    )


def bind_axes(cluster: Cluster, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the levels that each axis of a mesh spans, outermost axis first.

    Returns None if mesh and cluster differ in devices. A group on one level is bound to it by name.
    A group over several levels is bound to "nvlink:8+nic:2": 8 members in each unit of the inner
    level, and 2 such units. A group that fills its units unevenly is bound to the outermost level
    that it crosses, as if no two members were nearer. An axis of size 1 is bound to "device".

    >>> from autopar.costmodel import load_cluster
    >>> cluster = load_cluster("dgx-h100").sized(64)
    >>> bind_axes(cluster, (8, 8)), bind_axes(cluster, (4, 16))
    (('nic', 'nvlink'), ('nic', 'nvlink:8+nic:2'))
    >>> bind_axes(cluster, (4, 4, 4)), bind_axes(cluster, (3, 3))
    (('nic', 'nvlink:2+nic:2', 'nvlink'), None)
    """
    if math.prod(sizes) != cluster.devices or min(sizes, default=1) < 1:
        return None
    names = tuple(level.name for level in cluster.levels)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return tuple(
        _bind(cluster.units, names, stride, size)
        for stride, size in zip(strides, sizes, strict=True)
    )


def parse_span(cluster: Cluster, text: str, group: int) -> tuple[tuple[Level, int], ...]:
    """Return the levels that a group of `group` devices spans, inside out, with their branches.

    `text`: as `bind_axes` gives it.
    """
    if group == 1:
        return ()
    if ":" not in text:
        return ((cluster.level(text), group),)
    try:
        parts = [
            (name, int(count))
            for name, _, count in (part.partition(":") for part in text.split("+"))
        ]
    except ValueError:
        raise ClusterError(
            f"{text!r} does not name levels; write one, or 'nvlink:8+nic:2'"
        ) from None
    if math.prod(count for _, count in parts) != group or min(count for _, count in parts) < 2:
        raise ClusterError(f"{text!r} does not describe a group of {group} devices")
    return tuple((cluster.level(name), count) for name, count in parts)


@functools.lru_cache(maxsize=4096)
def joint_span(cluster: Cluster, spans: tuple[tuple[str, int], ...]) -> str:
    """Return the text of the levels that several axes span as one group.

    On each level their branches multiply. `spans`: each axis by its text of `bind_axes` and its
    size.

    >>> from autopar.costmodel import load_cluster
    >>> cluster = load_cluster("dgx-h100").sized(64)
    >>> joint_span(cluster, (("nic", 8), ("nvlink", 8)))
    'nvlink:8+nic:8'
    >>> joint_span(cluster, (("nvlink", 2), ("nvlink", 4)))
    'nvlink'
    """
    branches = dict.fromkeys((level.name for level in cluster.levels), 1)
    for text, size in spans:
        for level, count in parse_span(cluster, text, size):
            branches[level.name] *= count
    return _span_text(branches.items())
