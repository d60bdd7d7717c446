"""Rules of matrix products and attention: the contracted factor leaves a partial sum."""

from __future__ import annotations

import string

from autopar.errors import RuleError
from autopar.ir.recipes import ATTENTIONS
from autopar.ir.stored_products import AFFINE

from .narrow_products import blocked
from .registry import Call, register
from .selection import all_whole

INDEX_SCORES = "autopar.index_scores.default"


def matmul_dims(first: int, second: int, product: int) -> tuple[str, str, str]:
    """`b m k, b k n -> b m n` for tensors of these ranks, with broadcast batch dims; either side
    may be a vector.
    """
    left = "k" if first == 1 else "* m k"
    right = "k" if second == 1 else "* k n"
    star = "* " if product > ("m" in left) + ("n" in right) else ""
    if not star:
        left = left.removeprefix("* ")
        right = right.removeprefix("* ")
    else:
        left = left if first > 2 else left.removeprefix("* ")
        right = right if second > 2 else right.removeprefix("* ")
    out = star + " ".join(
        name for name in ("m", "n") if name in (left + right).replace("*", "").split()
    )
    return left, right, out


def _matmul(call: Call) -> str:
    left, right, out = matmul_dims(*(len(t.shape) for t in (*call.inputs, *call.outputs)))
    return f"{left}, {right} -> {out} | k: sum"


def _rank(call: Call, index: int) -> int:
    return len(call.inputs[index].shape) if index < len(call.inputs) else 0


def _linear(call: Call) -> str:
    """`* k, n k, +n -> * n`; a weight of one dim makes a number of each row."""
    if (rule := blocked(call)) is not None:
        return rule
    return (
        "* k, n k, +n -> * n | k: sum" if len(call.inputs[1].shape) == 2 else "* k, k -> * | k: sum"
    )


def _affine(call: Call) -> str:
    """`* k, k n, +n -> * n`."""
    return blocked(call) or "* k, k n, +n -> * n | k: sum"


def _addmm(call: Call) -> str:
    """`self + mat1 mat2`."""
    return f"+{' '.join(['m', 'n'][2 - _rank(call, 0) :])}, m k, k n -> m n | k: sum"


def _baddbmm(call: Call) -> str:
    """`self + batch1 batch2`, where `self` may lack leading dims."""
    return f"+{' '.join(['b', 'm', 'n'][3 - _rank(call, 0) :])}, b m k, b k n -> b m n | k: sum"


def _einsum(call: Call) -> str:
    """An einsum's equation is its rule; every subscript that is summed out leaves a partial sum.

    `...` stands for leading dims, which are summed if the result lacks it. A diagonal (a subscript
    that repeats within an operand) stays whole.
    """
    equation = call.get("equation")
    if not isinstance(equation, str):
        raise RuleError(f"{call.operator.name!r}: an einsum needs an equation, not {equation!r}")
    left, arrow, right = equation.replace(" ", "").replace("...", ".").partition("->")
    operands = left.split(",")
    # Without an arrow the result has the subscripts that occur once, in alphabetical order.
    if not arrow:
        right = ("." if "." in left else "") + "".join(
            sorted(c for c in set(left) - {",", "."} if left.count(c) == 1)
        )
    diagonal = {c for operand in operands for c in operand if operand.count(c) > 1}
    leading = [
        len(tensor.shape) - len(operand) + 1
        for operand, tensor in zip(operands, call.inputs, strict=True)
        if "." in operand
    ]
    lost = 0 if "." in right else max(leading, default=0)

    def spell(operand: str, rank: int) -> str:
        dims = []
        for c in operand:
            if c != ".":
                dims.append(f"!{c}" if c in diagonal else c)
            # Summed leading dims need names for their clause, and are aligned on the right.
            elif lost:
                dims += [f"d{i}" for i in range(lost - (rank - len(operand) + 1), lost)]
            elif "." in right:
                dims.append("*")
        return " ".join(dims)

    given = ", ".join(
        spell(operand, len(tensor.shape))
        for operand, tensor in zip(operands, call.inputs, strict=True)
    )
    summed = [
        *(f"d{i}" for i in range(lost)),
        *(c for c in string.ascii_letters if c in left and c not in right and c not in diagonal),
    ]
    return f"{given} -> {spell(right, 0)}" + (f" | {', '.join(summed)}: sum" if summed else "")


def _attention(call: Call) -> str:
    """Scaled dot-product attention on `[batch, heads, sequence, width]`, grouped heads, optional
    sinks of heads and mask.

    Keys are split only together with the queries, in a ring, and not if attention weights are
    dropped at random. Causal queries are not split on their own, since their positions decide which
    keys they see.
    """
    query = call.inputs[0].shape
    key = call.inputs[1].shape
    if (
        len({len(query), len(key), len(call.inputs[2].shape)}) > 1
    ):  # one is read again for every batch of the others
        return all_whole(call)
    heads, shared = (query[-3], key[-3]) if len(query) > 2 else (1, 1)
    # Grouped heads: r query heads in a row read one head of keys, so the split is that of groups.
    if heads != shared:
        head = "(g r)"
        group = "g"
    else:
        head = group = "g" if len(query) > 2 else ""
    rows = "!q" if call.get("is_causal") else "q"
    ring = not call.get("dropout_p") and heads % shared == 0
    star = "* " if len(query) > 3 else ""
    keys = "k" if ring else "!k"
    mask = "" if call.position("sinks") is None else f", {head}"
    place = call.position("attn_mask")
    if place is not None:
        shape = call.inputs[place].shape
        rank = len(shape)
        over = [head if shape[-3] > 1 else "1"] if rank > 2 else []
        # In a ring each rank has its queries' rows of the mask for all keys, so its columns are not
        # k.
        mask += ", " + ("* " if rank > 3 else "") + " ".join([*over, f"{rows} !xm"])
    # One mark is enough: a factor is whole wherever its name stands.
    dims = (
        f"{star}{head} {rows} !w, {star}{group} {keys} w, {star}{group} {keys} !e{mask} -> "
        f"{star}{head} q e"
    )
    return f"{dims} | k + q: ring" if ring else dims


# Two products: of the scores without the values' width e, of the values without the keys' width w.
# The factors in x belong to masks and caches.
register("aten.linear.default", _linear, linear=((0,),), products=("",))
register(AFFINE, _affine, linear=((0,),), products=("",))
register("aten.addmm.default", _addmm, products=("",))
register("aten.mm.default", "m k, k n -> m n | k: sum", linear=((0,), (1,)), products=("",))
register("aten.bmm.default", "b m k, b k n -> b m n | k: sum", linear=((0,), (1,)), products=("",))
register("aten.baddbmm.default", _baddbmm, products=("",))
register("aten.matmul.default", _matmul, linear=((0,), (1,)), products=("",))
register("aten.mv.default", "m k, k -> m | k: sum", linear=((0,), (1,)), products=("",))
register("aten.dot.default", "k, k -> | k: sum", linear=((0,), (1,)), products=("",))
register("aten.outer.default", "m, n -> m n", linear=((0,), (1,)), products=("",))
register("aten.einsum.default", _einsum, linear=((0,), (1,)), products=("",))
register(ATTENTIONS, _attention, products=("ex", "wx"))
# The heads that are added up share the keys (`autopar/torch_operators/index_scores.py`); its price
# counts the products of all of them (`costmodel/device/index_scores.py`).
register(INDEX_SCORES, "b s h !d, b t !d, b s h -> b s t | h: sum", products=("",))
