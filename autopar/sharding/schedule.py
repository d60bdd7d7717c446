"""`Schedule`: when the work of a step is done inside one stage, beside where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`micro_batches`: equal parts of the batch, run one after the other, their gradients added up.

    `recompute`: segments, each the names of operators whose outputs are made again in the backward pass. `gathered`: parameters stored
    split and used whole are "kept" from their first use on (ZeRO 1 and 2) or gathered "again" for the backward pass (ZeRO 3).
    `accumulated`: gradients of kept parameters are added up "whole" and scattered once a step (ZeRO 1), or as "shards" after every
    micro-batch (ZeRO 2).
    """

    micro_batches: int = 1
    recompute: tuple[tuple[str, ...], ...] = ()
    gathered: Literal["kept", "again"] = "kept"
    accumulated: Literal["whole", "shards"] = "whole"


PLAIN = Schedule()
"""One micro-batch, nothing made or gathered again."""
