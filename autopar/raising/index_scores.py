"""The scores of sparse attention in one operator: weights relu(scale query keyᵀ), over all heads.

The layer keeps a product of every query, head and key between its two products; the operator does
not. Source: DeepSeek-AI, DeepSeek-V3.2 (2025), section 2.1.
"""

from __future__ import annotations

from autopar.ir import Operator, Ref

from .spelling import Spelling, word

_NARROW = ("bfloat16", "float16", "float32")


def index_scores(operator: Operator, spelling: Spelling) -> Operator | None:
    """The scores whose dim of one row an operator takes away after both products."""
    outer = spelling.maker(operator.inputs[0], "matmul") if word(operator) == "squeeze" else None
    row = spelling.maker(outer.inputs[0], "unsqueeze") if outer is not None else None
    relu = spelling.maker(outer.inputs[1], "relu") if outer is not None else None
    if outer is None or row is None or relu is None:
        return None
    name, scale = spelling.multiple(relu.inputs[0])
    inner = spelling.maker(name, "matmul")
    turned = spelling.maker(inner.inputs[1], "unsqueeze") if inner is not None else None
    across = spelling.maker(spelling.uncast(turned.inputs[0]), "transpose") if turned else None
    if inner is None or across is None:
        return None
    dims = {across.attributes.get("dim0"), across.attributes.get("dim1")}
    key = spelling.uncast(across.inputs[0])
    wide = (inner.inputs[0], row.inputs[0], outer.outputs[0])
    shapes = [spelling.shape(each) for each in (*wide, key)]
    # The operator computes in single precision by itself, unless it is given more.
    single = {spelling.dtype(each) for each in wide} == {"float32"}
    narrow = spelling.dtype(key) in _NARROW
    if dims not in ({-1, -2}, {1, 2}) or not (single and narrow) or len(shapes[0]) != 4:
        return None
    b, s, h, d = shapes[0]
    t = shapes[2][-1]
    if shapes[1:] != [(b, s, h), (b, s, 1, t), (b, t, d)]:
        return None
    query = spelling.uncast(inner.inputs[0])
    return Operator(
        name=operator.name,
        kind="autopar.index_scores.default",
        inputs=(query if spelling.dtype(query) in _NARROW else inner.inputs[0], key, row.inputs[0]),
        outputs=operator.outputs,
        attributes={"query": Ref(0), "key": Ref(1), "weights": Ref(2), "scale": scale},
    )
