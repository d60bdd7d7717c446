"""OneFlow's SBP of n dims, in full or short.

    (oneflow.sbp.split(dim=0), oneflow.sbp.broadcast, oneflow.sbp.partial_sum)
    [S(0), B, P]
"""

from __future__ import annotations

import re

from ..errors import RuleError
from ..sharding.layout import Kind, Layout, P, Placement, R, S
from .place import Place, only_sums, whole_splits

_WORD = re.compile(
    r"(?:(?:oneflow|flow|autopar)\.)?(?:sbp\.)?(?:(?:split|S)\((?:(?:dim|axis)=)?(?P<dim>\d+)\)"
    r"|(?P<partial>partial_sum|P)\b|(?P<whole>broadcast|B)\b)(?:\(\))?"
)


def write(layout: Layout, place: Place) -> str:
    """R and B are both `broadcast`: its gradient is brought to it by whoever reads it."""
    whole_splits(layout, "OneFlow's SBP")
    only_sums(layout, "OneFlow's SBP")
    words = ["oneflow.sbp." + _word(placement) for placement in layout]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _word(placement: Placement) -> str:
    if placement.kind is Kind.SPLIT:
        return f"split(dim={placement.dim})"
    return "partial_sum" if placement.kind is Kind.PARTIAL else "broadcast"


def read(text: str, place: Place) -> Layout:
    """Each word in the order of the hierarchy, which is that of the mesh axes."""
    found: list[Placement] = []
    for match in _WORD.finditer(text):
        found.append(S(int(match["dim"])) if match["dim"] is not None else P if match["partial"] else R)
    left = re.sub(r"[\s,()\[\]]", "", _WORD.sub("", text))
    if left:
        raise RuleError(f"{text!r}: {left!r} is none of OneFlow's split(dim), broadcast, partial_sum (S(dim), B, P)")
    return tuple(found)
