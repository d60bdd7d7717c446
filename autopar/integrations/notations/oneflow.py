"""OneFlow's SBP of n dims, in full or short.

(oneflow.sbp.split(dim=0), oneflow.sbp.broadcast, oneflow.sbp.partial_sum)
[S(0), B, P]
"""

from __future__ import annotations

import re

from autopar.errors import RuleError
from autopar.sharding.layout import Kind, Layout, P, Placement, R, S

from .place import Place, as_tuple, only_sums, whole_splits

_WORD = re.compile(
    r"(?:(?:oneflow|flow|autopar)\.)?(?:sbp\.)?(?:(?:split|S)\((?:(?:dim|axis)=)?(?P<dim>\d+)\)"
    r"|(?P<partial>partial_sum|P)\b|(?P<whole>broadcast|B)\b)(?:\(\))?"
)


def write(layout: Layout, place: Place) -> str:
    """R and B are both `broadcast`: its gradient is brought to it by whoever reads it."""
    whole_splits(layout, "OneFlow's SBP")
    only_sums(layout, "OneFlow's SBP")
    return as_tuple(["oneflow.sbp." + _word(placement) for placement in layout])


def _word(placement: Placement) -> str:
    if placement.kind is Kind.SPLIT:
        return f"split(dim={placement.dim})"
    return "partial_sum" if placement.kind is Kind.PARTIAL else "broadcast"


def read(text: str, place: Place) -> Layout:
    """Each word in the order of the hierarchy, which is that of the mesh axes."""
    unread = re.sub(r"[\s,()\[\]]", "", _WORD.sub("", text))
    if unread:
        raise RuleError(
            f"{text!r}: {unread!r} is none of OneFlow's split(dim), broadcast, partial_sum "
            "(S(dim), B, P)"
        )
    return tuple(_placement(match) for match in _WORD.finditer(text))


def _placement(match: re.Match[str]) -> Placement:
    if match["dim"] is not None:
        return S(int(match["dim"]))
    return P if match["partial"] else R
