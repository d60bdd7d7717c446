"""Attention in one operator, which reads each head of keys and values once.

    softmax(scale q kᵀ + mask) v           of which sinks (`sinks.py`) may take some weight
    softmax(cap tanh(scale q kᵀ / cap) + mask) v

Source: Vaswani et al., 2017; heads of keys for groups of queries: Ainslie et al., GQA, 2023;
capped scores: Gemma 2, arXiv:2408.00118.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir import Operator, Ref, Value
from autopar.ir.recipes import WINDOWED

from .sinks import beside_sinks
from .spelling import Spelling, beside, word

ATTENTION = "scaled_dot_product_attention"


def attention(operator: Operator, spelling: Spelling) -> Operator | None:
    """The attention of which an operator is the last product, over heads that are not repeated."""
    whole = operator if word(operator) == ATTENTION else _spelled_out(operator, spelling)
    if whole is None:
        return None
    grouped = _grouped(whole, spelling)
    return grouped if grouped is not None or whole is operator else whole


def _spelled_out(operator: Operator, spelling: Spelling) -> Operator | None:
    """The attention that two products and a softmax make."""
    if word(operator) != "matmul" or len(spelling.shape(operator.outputs[0])) != 4:
        return None
    weights, value = operator.inputs
    weights = _unguarded(spelling.uncast(weights), spelling)
    whole = beside_sinks(weights, spelling)
    softmax = spelling.maker(weights, "softmax", "_softmax") if whole is None else whole[0]
    if softmax is None or softmax.attributes.get("dim") not in (-1, 3):
        return None
    scores = spelling.uncast(softmax.inputs[0] if whole is None else whole[1])
    add = spelling.maker(scores, "add")
    if add is not None and add.attributes.get("alpha", 1) != 1:
        return None
    sides = list(spelling.pairs(add)) if add is not None else [(scores, "")]
    for side, mask in sides:
        name, scale, cap = spelling.capped(side)
        product = spelling.maker(name, "matmul")
        if product is None or (mask and not _is_mask(mask, scores, spelling)):
            continue
        query, by_query = spelling.multiple(product.inputs[0])
        turned, by_key = spelling.multiple(product.inputs[1])
        key = _turned(turned, spelling)
        if key is None:
            continue
        ends = (query, key, value, operator.outputs[0])
        narrowed = spelling.width(query) > spelling.width(softmax.outputs[0])
        # Products broadcast their batches and heads, kernels do not.
        heads = {(len(shape), *shape[:2]) for shape in map(spelling.shape, ends)}
        if narrowed or len(heads) > 1 or len({spelling.dtype(end) for end in ends}) > 1:
            return None
        given = {"query": query, "key": key, "value": value}
        given |= {} if whole is None else {"sinks": whole[2]}
        given |= {"attn_mask": mask} if mask else {}
        attributes: dict[str, Value] = {name: Ref(place) for place, name in enumerate(given)}
        ours = whole is not None or cap
        # Torch's kernels have no gradient of a mask, and written out it takes fewer passes.
        if mask in spelling.learned and not ours:
            return None
        kind = WINDOWED if ours else f"aten.{ATTENTION}.default"
        attributes |= {"cap": cap} if cap else {}
        return Operator(
            name=beside(operator, kind.split(".")[1]),
            kind=kind,
            inputs=tuple(given.values()),
            outputs=operator.outputs,
            attributes={**attributes, "scale": scale * by_query * by_key},
        )
    return None


def _unguarded(name: str, spelling: Spelling) -> str:
    """The weights, without the zeros that take the place of those of rows that see nothing."""
    where = spelling.maker(name, "where")
    asked = spelling.maker(where.inputs[0], "isnan") if where is not None else None
    if where is None or asked is None or where.inputs[-1] != asked.inputs[0]:
        return name
    if spelling.number(where, "self", 1) != 0:
        return name
    return spelling.uncast(asked.inputs[0])


def _is_mask(name: str, scores: str, spelling: Spelling) -> bool:
    """Whether a tensor is added to all scores."""
    shape = spelling.shape(name)
    whole = spelling.shape(scores)
    fits = all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))
    return fits and len(shape) >= 2


def _turned(name: str, spelling: Spelling) -> str | None:
    """The tensor [b, h, s, w] of which a value is [b, h, w, s]."""
    maker = spelling.maker(name, "permute", "transpose", "mT")
    if maker is not None:
        given = maker.attributes
        dims = given.get("dims") or (given.get("dim0", 2), given.get("dim1", 3))
        wanted = ((0, 1, 3, 2), (2, 3), (3, 2), (-1, -2), (-2, -1))
        return maker.inputs[0] if dims in wanted and len(spelling.shape(name)) == 4 else None
    # Exporters turn the matrices of all heads in one dim.
    apart = spelling.maker(name, "reshape", "view")
    turned = spelling.maker(apart.inputs[0], "permute") if apart is not None else None
    joined = spelling.maker(turned.inputs[0], "reshape", "view") if turned is not None else None
    if turned is None or joined is None or turned.attributes.get("dims") != (0, 2, 1):
        return None
    b, h, w, s = spelling.shape(name)
    ways = (spelling.shape(joined.inputs[0]), spelling.shape(joined.outputs[0]))
    return joined.inputs[0] if ways == ((b, h, s, w), (b * h, s, w)) else None


def _grouped(operator: Operator, spelling: Spelling) -> Operator | None:
    """Attention over keys and values before they were repeated for the queries' groups."""
    if operator.attributes.get("enable_gqa") or len(operator.inputs) < 3:
        return None
    key, value = (_before_repeat(name, spelling) for name in operator.inputs[1:3])
    if key is None or value is None or spelling.shape(key)[1] != spelling.shape(value)[1]:
        return None
    attributes = dict(operator.attributes)
    # The operator with sinks needs not be told.
    if word(operator) == ATTENTION:
        attributes["enable_gqa"] = True
    inputs = (operator.inputs[0], key, value, *operator.inputs[3:])
    return replace(operator, inputs=inputs, attributes=attributes)


def _before_repeat(name: str, spelling: Spelling) -> str | None:
    """The heads of which each is repeated in a row, by a new dim that is expanded or by number."""
    shape = spelling.shape(name)
    interleaved = spelling.maker(name, "repeat_interleave")
    if interleaved is not None and interleaved.attributes.get("dim") in (1, -3) and len(shape) == 4:
        return interleaved.inputs[0] if len(interleaved.inputs) == 1 else None
    joined = spelling.maker(name, "reshape", "view", "flatten", "_unsafe_view")
    spread = spelling.maker(joined.inputs[0], "expand") if joined is not None else None
    apart = spelling.maker(spread.inputs[0], "unsqueeze", "reshape", "view") if spread else None
    if apart is None or spread is None or len(shape) != 4:
        return None
    source = spelling.shape(apart.inputs[0])
    if len(source) != 4:
        return None
    batch, heads, length, width = source
    each = (batch, heads, shape[1] // heads, length, width)
    fits = spelling.shape(spread.outputs[0]) == each and math.prod(each) == math.prod(shape)
    alone = spelling.shape(spread.inputs[0]) == (batch, heads, 1, length, width)
    return apart.inputs[0] if fits and alone and shape[2:] == (length, width) else None
