"""Rotary positions in one operator, whether they are written by rows or by halves.

x cos + (-x2, x1) sin                            (x1, x2): halves of the last dim
(x1 cos - x2 sin, x2 cos + x1 sin)               or the two elements of its pairs
"""

from __future__ import annotations

from autopar.ir import Operator, Ref

from .spelling import Spelling, beside, word


def rotation(operator: Operator, spelling: Spelling) -> Operator | None:
    """The rotation of which an operator is the sum or the join."""
    turn = _by_rows(operator, spelling) or _by_halves(operator, spelling)
    if turn is None or not _fits(turn[:3], operator, spelling):
        return None
    x, cos, sin, pairs = turn
    return Operator(
        name=beside(operator, "rotate"),
        kind="autopar.rotate.default",
        inputs=(x, cos, sin),
        outputs=operator.outputs,
        attributes={"x": Ref(0), "cos": Ref(1), "sin": Ref(2), "pairs": pairs},
    )


Turn = tuple[str, str, str, bool]
"""The tensor that is turned, the angles' cosine and sine, and whether pairs lie side by side."""


def _by_rows(operator: Operator, spelling: Spelling) -> Turn | None:
    if word(operator) != "add" or operator.attributes.get("alpha", 1) != 1:
        return None
    for one, other in spelling.pairs(operator):
        left = spelling.maker(one, "mul")
        right = spelling.maker(other, "mul")
        if left is None or right is None:
            return None
        for turned, sin in spelling.pairs(right):
            x = _turned(turned, spelling)
            for source, cos in spelling.pairs(left):
                if x == source:
                    return x, cos, sin, False
    return None


def _turned(name: str, spelling: Spelling) -> str | None:
    """The tensor x of which a value is (-x2, x1)."""
    join = _join(spelling.maker(name, "cat"), spelling)
    less = spelling.maker(join.inputs[0], "neg") if join is not None else None
    if join is None or less is None:
        return None
    second = _half(less.inputs[0], spelling)
    first = _half(join.inputs[1], spelling)
    x = second[0] if second is not None else ""
    return x if (first, second) == ((x, 0, False), (x, 1, False)) else None


def _by_halves(operator: Operator, spelling: Spelling) -> Turn | None:
    join = _join(operator, spelling)
    less = spelling.maker(join.inputs[0], "sub") if join is not None else None
    more = spelling.maker(join.inputs[1], "add") if join is not None else None
    if (
        less is None
        or more is None
        or any(op.attributes.get("alpha", 1) != 1 for op in (less, more))
    ):
        return None
    products = [spelling.maker(name, "mul") for name in (*less.inputs, *more.inputs)]
    if len(products) != 4 or None in products:
        return None
    sides = [dict(spelling.pairs(product)) for product in products if product is not None]
    for first, cos in sides[0].items():
        for second, sin in sides[1].items():
            # Sums and products are written in any order.
            crossed = [sides[2].get(second), sides[3].get(first)]
            other = [sides[3].get(second), sides[2].get(first)]
            one = _half(first, spelling)
            two = _half(second, spelling)
            if one is None or two is None or [cos, sin] not in (crossed, other):
                continue
            if (one[0], 0, one[2]) == one and two == (one[0], 1, one[2]):
                return one[0], cos, sin, one[2]
    return None


def _join(operator: Operator | None, spelling: Spelling) -> Operator | None:
    """An operator, if it joins two tensors along their last dim."""
    if operator is None or word(operator) != "cat" or len(operator.inputs) != 2:
        return None
    rank = len(spelling.shape(operator.outputs[0]))
    return operator if operator.attributes.get("dim") in (-1, rank - 1) else None


def _half(name: str, spelling: Spelling) -> tuple[str, int, bool] | None:
    """The tensor of whose last dim a value is a half, which one, and whether it is every other."""
    maker = spelling.maker(name, "slice", "chunk", "split", "split_with_sizes")
    if maker is None:
        return None
    whole = spelling.shape(maker.inputs[0])
    half = spelling.shape(name) == (*whole[:-1], whole[-1] // 2) and whole[-1] % 2 == 0
    if not half or maker.attributes.get("dim", 0) not in (-1, len(whole) - 1):
        return None
    if word(maker) != "slice":
        return maker.inputs[0], maker.outputs.index(name), False
    start = maker.attributes.get("start") or 0
    step = maker.attributes.get("step", 1)
    starts = {1: (0, whole[-1] // 2), 2: (0, 1)}.get(step if isinstance(step, int) else 0, ())
    return (maker.inputs[0], starts.index(start), step == 2) if start in starts else None


def _fits(names: tuple[str, ...], operator: Operator, spelling: Spelling) -> bool:
    """Whether angles are of the type of x, broadcast to it, and lie a row or half a row wide."""
    shape = spelling.shape(names[0])
    angles = [spelling.shape(name) for name in names[1:]]
    broadcast = all(
        len(angle) <= len(shape)
        and all(a in (1, b) for a, b in zip(angle[-2::-1], shape[-2::-1], strict=False))
        for angle in angles
    )
    widths = {angle[-1:] for angle in angles}
    halved = word(operator) == "cat"
    types = {spelling.dtype(name) for name in (*names, *operator.outputs)}
    wide = widths == {(shape[-1] // 2 if halved else shape[-1],)}
    return broadcast and wide and len(types) == 1 and spelling.shape(operator.outputs[0]) == shape
