"""DTensor's placements as torch prints them.

    (Shard(dim=0), Replicate(), _StridedShard(dim=1, sf=3), Partial(sum))
"""

from __future__ import annotations

import re

from ..errors import RuleError
from ..sharding.layout import Kind, Layout, P, Placement, R, S
from .place import Place

_PLACEMENT = re.compile(
    r"Shard\((?:dim=)?(?P<dim>\d+)\)|_StridedShard\((?:dim=)?(?P<strided>\d+), *(?:sf|split_factor)=(?P<parts>\d+)\)"
    r"|(?P<whole>Replicate\(\))|Partial\((?:'?(?P<op>sum|max|min)'?)?\)"
)


def write(layout: Layout, place: Place) -> str:
    """R and B are both `Replicate`: DTensor keeps no kind of the gradient."""
    words = [_word(placement) for placement in layout]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _word(placement: Placement) -> str:
    if placement.kind is Kind.SPLIT:
        within = placement.parts > 1
        return f"_StridedShard(dim={placement.dim}, sf={placement.parts})" if within else f"Shard(dim={placement.dim})"
    return f"Partial({placement.reduction})" if placement.kind is Kind.PARTIAL else "Replicate()"


def read(text: str, place: Place) -> Layout:
    """Each placement in the order of the mesh axes."""
    found: list[Placement] = []
    rest = text.strip().removeprefix("(").removesuffix(")") if text.strip().startswith("(") else text.strip()
    for match in _PLACEMENT.finditer(rest):
        if match["dim"] is not None:
            found.append(S(int(match["dim"])))
        elif match["strided"] is not None:
            found.append(S(int(match["strided"]), int(match["parts"])))
        else:
            found.append(R if match["whole"] else Placement(Kind.PARTIAL, reduction=match["op"]) if match["op"] else P)
    left = re.sub(r"[\s,]", "", _PLACEMENT.sub("", rest))
    if left:
        valid = "Shard(dim), Replicate(), Partial(sum|max|min), _StridedShard(dim, sf=parts)"
        raise RuleError(f"{text!r}: {left!r} is none of DTensor's placements {valid}")
    return tuple(found)
