"""Kinds of runs, by what is known of their kernels: each has errors of its own."""

from __future__ import annotations

WIDE_TYPES = "16 bits"
NARROW_TYPES = "8 bits"
EXPERTS = "experts"
UNMEASURED = "unmeasured kernels"
RUN_KINDS = (WIDE_TYPES, NARROW_TYPES, EXPERTS, UNMEASURED)


def run_kind(*, experts: bool, narrow: bool, unmeasured: bool) -> str:
    """The kind of a run: the least certain one of those that it is of.

    `experts`: tokens go to experts. `narrow`: products have operands of 8 bits or fewer.
    `unmeasured`: some of its kernels are in no table (scans, attention with sinks, float32 on a
    device whose 16-bit products were measured).

    >>> run_kind(experts=True, narrow=True, unmeasured=False)
    'experts'
    """
    if unmeasured:
        return UNMEASURED
    if experts:
        return EXPERTS
    return NARROW_TYPES if narrow else WIDE_TYPES
