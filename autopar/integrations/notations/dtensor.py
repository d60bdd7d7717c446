"""DTensor's placements as torch prints them.

(Shard(dim=0), Replicate(), _StridedShard(dim=1, sf=3), Partial(sum))
"""

from __future__ import annotations

import re

from autopar.errors import RuleError
from autopar.sharding.layout import Kind, Layout, P, Placement, R, S

from .place import Place, as_tuple

_PLACEMENT = re.compile(
    r"Shard\((?:dim=)?(?P<dim>\d+)\)"
    r"|_StridedShard\((?:dim=)?(?P<strided>\d+), *(?:sf|split_factor)=(?P<parts>\d+)\)"
    r"|(?P<whole>Replicate\(\))|Partial\((?:'?(?P<op>sum|max|min)'?)?\)"
)


def write(layout: Layout, place: Place) -> str:
    """R and B are both `Replicate`: DTensor keeps no kind of the gradient."""
    return as_tuple([_word(placement) for placement in layout])


def _word(placement: Placement) -> str:
    if placement.kind is Kind.SPLIT:
        if placement.parts > 1:
            return f"_StridedShard(dim={placement.dim}, sf={placement.parts})"
        return f"Shard(dim={placement.dim})"
    return f"Partial({placement.reduction})" if placement.kind is Kind.PARTIAL else "Replicate()"


def read(text: str, place: Place) -> Layout:
    """Each placement in the order of the mesh axes."""
    inside = text.strip()
    if inside.startswith("("):
        inside = inside.removeprefix("(").removesuffix(")")
    unread = re.sub(r"[\s,]", "", _PLACEMENT.sub("", inside))
    if unread:
        valid = "Shard(dim), Replicate(), Partial(sum|max|min), _StridedShard(dim, sf=parts)"
        raise RuleError(f"{text!r}: {unread!r} is none of DTensor's placements {valid}")
    return tuple(_placement(match) for match in _PLACEMENT.finditer(inside))


def _placement(match: re.Match[str]) -> Placement:
    if match["dim"] is not None:
        return S(int(match["dim"]))
    if match["strided"] is not None:
        return S(int(match["strided"]), int(match["parts"]))
    if match["whole"]:
        return R
    return Placement(Kind.PARTIAL, reduction=match["op"]) if match["op"] else P
