"""Rules of matrix products and attention: the contracted factor leaves a partial sum."""

from __future__ import annotations

import string

from ...errors import RuleError
from .registry import Call, register


def _matmul(call: Call) -> str:
    """`b m k, b k n -> b m n` with broadcast batch dims; either side may be a vector."""
    left = "k" if len(call.inputs[0].shape) == 1 else "* m k"
    right = "k" if len(call.inputs[1].shape) == 1 else "* k n"
    depth = len(call.outputs[0].shape)
    star = "* " if depth > ("m" in left) + ("n" in right) else ""
    if not star:
        left, right = left.removeprefix("* "), right.removeprefix("* ")
    else:
        left = left if len(call.inputs[0].shape) > 2 else left.removeprefix("* ")
        right = right if len(call.inputs[1].shape) > 2 else right.removeprefix("* ")
    out = star + " ".join(name for name in ("m", "n") if name in (left + right).replace("*", "").split())
    return f"{left}, {right} -> {out} | k: sum"


def _gemm(call: Call) -> str:
    """`alpha * A B + beta * C` with optional transposes; C is added once."""
    left = "k m" if call.integer("transA") else "m k"
    right = "n k" if call.integer("transB") else "k n"
    return f"{left}, {right}, +* -> m n | k: sum".replace("+*", "+" + " ".join(["m", "n"][2 - _rank(call, 2) :]))


def _rank(call: Call, index: int) -> int:
    return len(call.inputs[index].shape) if index < len(call.inputs) else 0


def _addmm(call: Call) -> str:
    """`self + mat1 mat2`."""
    return f"+{' '.join(['m', 'n'][2 - _rank(call, 0) :])}, m k, k n -> m n | k: sum"


def _einsum(call: Call) -> str:
    """An einsum's own equation is its rule; every subscript that is summed out leaves a partial sum."""
    equation = call.get("equation")
    if not isinstance(equation, str) or "." in equation:
        raise RuleError(f"einsum equation {equation!r}: give it without '...'")
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if any(len(set(operand)) != len(operand) for operand in operands):
        raise RuleError(f"einsum equation {equation!r}: a subscript repeats within one operand")
    summed = [c for c in string.ascii_letters if c in left and c not in right]
    tail = f" | {', '.join(summed)}: sum" if summed else ""
    return ", ".join(" ".join(operand) for operand in operands) + " -> " + " ".join(right) + tail


def _attention(call: Call) -> str:
    """Scaled dot-product attention on `[batch, heads, sequence, width]`, grouped heads, optional mask.

    The key sequence is kept whole: splitting it would need a ring of exchanges.
    """
    query, key = call.inputs[0].shape, call.inputs[1].shape
    grouped = query[-3] != key[-3]
    head, shared = ("(g r)", "g") if grouped else ("g", "g")
    causal = "!" if call.get("is_causal") else ""
    star = "* " if len(query) > 3 else ""
    mask = ""
    if len(call.inputs) > 3:
        rank = len(call.inputs[3].shape)
        dims = [head if call.inputs[3].shape[-3] > 1 else "1"] if rank > 2 else []
        mask = ", " + ("* " if rank > 3 else "") + " ".join([*dims, f"{causal}q !k"])
    return f"{star}{head} {causal}q !w, {star}{shared} !k w, {star}{shared} k !e{mask} -> {star}{head} q e"


def _onnx_attention(call: Call) -> str:
    """ONNX `Attention`: four dims as above, or three with the heads inside the last; with a cache only the batch is split."""
    query = call.inputs[0].shape
    if any(call.position(name) is not None for name in ("past_key", "past_value", "nonpad_kv_seqlen")) or len(call.outputs) > 1:
        return ", ".join("b " + _whole(t.shape[1:], j) for j, t in enumerate(call.inputs)) + " -> " + _batched_outputs(call)
    if len(query) == 4:
        return _attention(call)
    heads, shared = call.integer("q_num_heads"), call.integer("kv_num_heads")
    causal = "!" if call.get("is_causal") else ""
    head, group = (f"g={shared} r={heads // shared}", f"g={shared}") if heads != shared else (f"g={heads}", f"g={heads}")
    mask = ""
    if len(call.inputs) > 3:
        rank = len(call.inputs[3].shape)
        lead = ["b", f"({head})" if rank > 2 and call.inputs[3].shape[-3] > 1 else "1"]
        mask = ", " + " ".join([*lead[4 - rank :], f"{causal}q !k"])
    return f"b {causal}q ({head} !w), b !k ({group} !w), b !k ({group} !e){mask} -> b q ({head} !e)"


def _whole(shape: tuple[int, ...], tensor: int) -> str:
    return " ".join(f"!w{tensor}_{i}" for i in range(len(shape)))


def _batched_outputs(call: Call) -> str:
    return ", ".join("b " + _whole(t.shape[1:], len(call.inputs) + j) for j, t in enumerate(call.outputs))


register("onnx.Attention", _onnx_attention, products=("e", "w"))
register("aten.linear.default", "* k, n k, +n -> * n | k: sum", linear=((0,),), products=("",))
register("aten.addmm.default", _addmm, products=("",))
register("aten.mm.default", "m k, k n -> m n | k: sum", linear=((0,), (1,)), products=("",))
register("aten.bmm.default", "b m k, b k n -> b m n | k: sum", linear=((0,), (1,)), products=("",))
register("aten.baddbmm.default", "+b m n, b m k, b k n -> b m n | k: sum", products=("",))
register("aten.matmul.default onnx.MatMul", _matmul, linear=((0,), (1,)), products=("",))
register("aten.mv.default", "m k, k -> m | k: sum", linear=((0,), (1,)), products=("",))
register("aten.dot.default", "k, k -> | k: sum", linear=((0,), (1,)), products=("",))
register("aten.outer.default", "m, n -> m n", linear=((0,), (1,)), products=("",))
register("onnx.Gemm", _gemm, products=("",))
register("aten.einsum.default onnx.Einsum", _einsum, linear=((0,), (1,)), products=("",))
register("aten.scaled_dot_product_attention.default", _attention, products=("e", "w"))
