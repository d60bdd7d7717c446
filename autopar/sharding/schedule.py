"""`Schedule`: when the work of a step is done inside one stage, beside where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNIT_BYTES = 25 * 2**20
"""25 MiB, as the buckets of torch's DistributedDataParallel (its `bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`micro_batches`: equal parts of the batch, run one after the other, their gradients added up.

    `recompute`: segments, each the names of operators whose outputs are made again in the backward pass. `gathered`: parameters stored
    split and used whole are "kept" from their first use on (ZeRO 1 and 2) or gathered "again" for the backward pass (ZeRO 3).
    `accumulated`: gradients of kept parameters are added up "whole" and scattered once a step (ZeRO 1), or as "shards" after every
    micro-batch (ZeRO 2). `unit_bytes`: parameters are gathered and their gradients reduced in units of about so many bytes, gathers
    `prefetch` segments ahead.
    """

    micro_batches: int = 1
    recompute: tuple[tuple[str, ...], ...] = ()
    gathered: Literal["kept", "again"] = "kept"
    accumulated: Literal["whole", "shards"] = "whole"
    unit_bytes: int = UNIT_BYTES
    prefetch: int = 1


PLAIN = Schedule()
"""One micro-batch, nothing made or gathered again."""
