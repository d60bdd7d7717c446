"""Rotary positions in one operator: x cos + (-x2, x1) sin, x1 and x2 the halves of the last dim."""

from __future__ import annotations

from autopar.ir import Operator, Ref

from .spelling import Spelling, beside, word


def rotation(operator: Operator, spelling: Spelling) -> Operator | None:
    """The rotation whose two products an operator adds up."""
    if word(operator) != "add" or operator.attributes.get("alpha", 1) != 1:
        return None
    for one, other in spelling.pairs(operator):
        left, right = (spelling.maker(name, "mul") for name in (one, other))
        if left is None or right is None:
            return None
        for turned, sin in spelling.pairs(right):
            x = _turned(turned, spelling)
            for source, cos in spelling.pairs(left):
                if x == source and _fits(x, cos, sin, operator, spelling):
                    return Operator(
                        name=beside(operator, "rotate"),
                        kind="autopar.rotate.default",
                        inputs=(x, cos, sin),
                        outputs=operator.outputs,
                        attributes={"x": Ref(0), "cos": Ref(1), "sin": Ref(2)},
                    )
    return None


def _turned(name: str, spelling: Spelling) -> str | None:
    """The tensor x of which a value is (-x2, x1)."""
    join = spelling.maker(name, "cat")
    rank = len(spelling.shape(name))
    if join is None or len(join.inputs) != 2 or join.attributes.get("dim") not in (-1, rank - 1):
        return None
    less = spelling.maker(join.inputs[0], "neg")
    second = _half(less.inputs[0], 1, spelling) if less is not None else None
    return second if second == _half(join.inputs[1], 0, spelling) else None


def _half(name: str, place: int, spelling: Spelling) -> str | None:
    """The tensor of whose last dim a value is the first or the second half."""
    maker = spelling.maker(name, "slice", "chunk", "split", "split_with_sizes")
    if maker is None:
        return None
    whole = spelling.shape(maker.inputs[0])
    rank = len(whole)
    half = spelling.shape(name) == (*whole[:-1], whole[-1] // 2) and whole[-1] % 2 == 0
    if not half or maker.attributes.get("dim", 0) not in (-1, rank - 1):
        return None
    if word(maker) == "slice":
        start = maker.attributes.get("start") or 0
        stepped = maker.attributes.get("step", 1) != 1
        return None if stepped or start != place * whole[-1] // 2 else maker.inputs[0]
    return maker.inputs[0] if maker.outputs.index(name) == place else None


def _fits(x: str, cos: str, sin: str, operator: Operator, spelling: Spelling) -> bool:
    """Whether angles are of the type and width of x, and broadcast to it."""
    shape = spelling.shape(x)
    angles = (spelling.shape(cos), spelling.shape(sin))
    broadcast = all(
        len(angle) <= len(shape)
        and angle[-1:] == shape[-1:]
        and all(a in (1, b) for a, b in zip(reversed(angle), reversed(shape), strict=False))
        for angle in angles
    )
    types = {spelling.dtype(name) for name in (x, cos, sin, *operator.outputs)}
    return broadcast and len(types) == 1
