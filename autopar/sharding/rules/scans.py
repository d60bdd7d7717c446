"""Rules of scans: along the scanned dim a shard needs the totals of the shards before it."""

from __future__ import annotations

from .registry import Call, register
from .spelling import whole


def _scan(call: Call) -> str:
    """Each shard scans its own elements and adds (or multiplies by) the totals before it."""
    # A single number has no dim to scan.
    rank = len(call.inputs[0].shape)
    if rank == 0:
        return " -> "
    dims = " ".join(f"d{i}" for i in range(rank))
    rest = "".join(f", {whole(t.shape, 'w')}" for t in call.inputs[1:])
    return f"{dims}{rest} -> {dims} | d{call.integer('dim') % rank}: prefix"


register("aten.cumsum.default", _scan, linear=((0,),), saves="")
register("aten.cumprod.default", _scan)
