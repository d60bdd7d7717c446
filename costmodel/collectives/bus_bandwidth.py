"""Bandwidths of a collective as the field states them.

    algorithm bandwidth = bytes / time        bus bandwidth = algorithm bandwidth *
                                              factor(collective, ranks)

The factor makes the figure comparable with the links' rate, whatever the collective and the number
of ranks (NCCL tests, doc/PERFORMANCE.md; bytes by the convention of `collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.errors import ClusterError, unknown

_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}


def bus_factor(kind: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 4), bus_factor("broadcast", 8)
    (1.75, 0.75, 1.0)
    """
    if kind not in _FACTORS:
        raise ClusterError(unknown("collective", kind, _FACTORS))
    return _FACTORS[kind](ranks)
