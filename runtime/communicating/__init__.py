"""Local forms of operators that communicate inside themselves, under the words that rules use for them.

What each issues must be what `autopar.sharding.communication` says of the word: kind, bytes and order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.ir import Value

from ..collectives import AxisGroup
from . import halo, loss, ring, rows, scans, softmax, statistics

if TYPE_CHECKING:
    from ..localise import LocalCall

Local = tuple[Callable[..., Any], Mapping[str, Value]]
Builder = Callable[["LocalCall", AxisGroup], Local]

COMMUNICATING: Mapping[str, Builder] = {
    "dispatch": rows.dispatch,
    "halo": halo.split_space,
    "normalize": softmax.split_rows,
    "prefix": scans.split_scan,
    "ring": ring.split_keys,
    "statistics": statistics.split_statistics,
    "vocabulary": loss.split_classes,
}
"""Word → the function that a rank runs, and the attributes to change or add."""
