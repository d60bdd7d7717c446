"""Attentions of onnxruntime: packed, with caches, masks and rotary positions of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import TensorProto

from autopar.frontends.onnx.writer import Writer


def _heads(w: Writer, x: str, heads: int) -> str:
    """(batch, length, heads x width) as (batch, heads, length, width)."""
    if len(w.shape(x)) == 4:
        return x
    batch, length, width = w.shape(x)
    split = w.reshape(x, batch, length, heads, width // heads)
    return str(w("Transpose", split, perm=[0, 2, 1, 3]))


def _joined(w: Writer, y: str) -> str:
    """(batch, heads, length, width) as (batch, length, heads x width)."""
    batch, heads, length, width = w.shape(y)
    return w.reshape(w("Transpose", y, perm=[0, 2, 1, 3]), batch, length, heads * width)


def _attended(
    w: Writer, by_heads: Sequence[str], *, masks: list[str], bias: str = "", causal: bool = False
) -> None:
    """The node's first output, and its present keys and values are the caller's.

    `masks`: booleans of the keys that are seen; `bias`: what is added to the scores.
    """
    rows, keys = (w.shape(name)[2] for name in by_heads[:2])
    if causal and keys != rows:
        # Queries stand at the end of the keys.
        own = np.arange(rows)[:, None] + keys - rows
        masks = [*masks, w.constant(np.arange(keys) <= own, TensorProto.BOOL)]
        causal = False
    mask = ""
    for other in masks:
        mask = str(w("And", mask, other)) if mask else other
    if bias and mask:
        hidden = w.constant(w.attribute("mask_filter_value", -np.inf), bias)
        bias = str(w("Where", mask, bias, hidden))
        mask = ""
    given = [*by_heads, *[name for name in (mask or bias,) if name]]
    scale = w.attribute("scale", 0.0) or None
    softcap = w.attribute("softcap", 0.0) or None
    y = w("Attention", *given, scale=scale, softcap=softcap, is_causal=int(causal))
    w.last("Identity", _joined(w, y))


def _seen(w: Writer, mask: str, keys: int) -> str:
    """The booleans of a mask: of lengths (batch), or of keys (batch, keys) and more dims."""
    shape = w.shape(mask)
    if len(shape) == 1:
        lengths = w("Unsqueeze", w("Cast", mask, to=TensorProto.INT64), w.constant([1, 2, 3]))
        return str(w("Less", w.constant(np.arange(keys)), lengths))
    seen = w("Cast", mask, to=TensorProto.BOOL)
    axes = {2: [1, 2], 3: [1]}.get(len(shape))
    return str(w("Unsqueeze", seen, w.constant(axes))) if axes else str(seen)


def _with_past(w: Writer, past: str, new: str) -> str:
    """Keys or values after those of a cache."""
    return str(w("Concat", past, new, axis=2)) if past else new


def packed_attention(w: Writer) -> None:
    """Attention whose product makes queries, keys and values of one input."""
    x, weight, bias, mask, past, added, *_ = w.inputs(
        "input weights bias mask_index past attention_bias past_sequence_length"
    )
    made = w("MatMul", x, weight)
    attend(w, str(w("Add", made, bias)) if bias else str(made), mask, past, added)


def attend(w: Writer, made: str, mask: str, past: str, added: str) -> None:
    """Attention of queries, keys and values in one tensor."""
    heads = w.attribute("num_heads", 1)
    if w.attribute("do_rotary", 0):
        raise w.refuse("turns its queries (do_rotary), which is not supported")
    if mask and len(w.shape(mask)) == 1 and w.shape(mask)[0] != w.shape(made)[0]:
        raise w.refuse("has a mask of ends and starts, which is not supported")
    width = w.shape(made)[-1]
    sizes = list(w.attribute("qkv_hidden_sizes", [])) or [width // 3] * 3
    q, k, v = (_heads(w, part, heads) for part in w.split(made, sizes))
    if past:
        first, second = w.split(past, [1, 1], axis=0)
        axis = w.constant([0])
        k = _with_past(w, w("Squeeze", first, axis), k)
        v = _with_past(w, w("Squeeze", second, axis), v)
    if w.wanted(1):
        axis = w.constant([0])
        pair = [w("Unsqueeze", part, axis) for part in (k, v)]
        w.last("Concat", *pair, place=1, axis=0)
    masks = [_seen(w, mask, w.shape(k)[2])] if mask else []
    causal = bool(w.attribute("unidirectional", 0))
    _attended(w, (q, k, v), masks=masks, bias=added, causal=causal)


def multi_head_attention(w: Writer) -> None:
    """Attention of separate or packed queries, keys and values."""
    q, k, v, bias, padding, added, past_k, past_v, *_ = w.inputs(
        "query key value bias key_padding_mask attention_bias past_key past_value length"
    )
    heads = w.attribute("num_heads", 1)
    if len(w.shape(q)) == 5:
        q, k, v = _unpacked(w, q, 3)
    elif k and len(w.shape(k)) == 5:
        k, v = _unpacked(w, k, 2)
    if bias:
        of = [w.shape(name)[-1] if len(w.shape(name)) == 3 else 0 for name in (q, k, v)]
        # Keys that are by heads already are from a cache, and have their bias.
        widths = [width or of[0] for width in of]
        parts = w.split(bias, widths)
        q, k, v = (
            str(w("Add", name, part)) if width else name
            for name, part, width in zip((q, k, v), parts, of, strict=True)
        )
    q, k, v = (_heads(w, name, heads) for name in (q, k, v))
    k, v = (_with_past(w, past, new) for past, new in ((past_k, k), (past_v, v)))
    w.last("Identity", k, place=1)
    w.last("Identity", v, place=2)
    masks = [_seen(w, padding, w.shape(k)[2])] if padding else []
    causal = bool(w.attribute("unidirectional", 0))
    _attended(w, (q, k, v), masks=masks, bias=added, causal=causal)


def _unpacked(w: Writer, x: str, count: int) -> list[str]:
    """The parts of (batch, length, heads, parts, width), by heads."""
    parts = w.split(x, [1] * count, axis=3)
    turned = (w("Squeeze", part, w.constant([3])) for part in parts)
    return [str(w("Transpose", part, perm=[0, 2, 1, 3])) for part in turned]


def rotary_embedding(w: Writer) -> None:
    """Queries or keys turned by their positions."""
    x, positions, cos, sin = w.inputs("input position_ids cos_cache sin_cache")
    batch = w.shape(x)[0]
    length = w.shape(x)[-2 if len(w.shape(x)) == 4 else 1]
    if len(w.shape(positions)) == 1:
        steps = w("Add", w.constant([range(length)]), positions)
        positions = w("Expand", steps, w.constant([batch, length]))
    size = w.attribute("rotary_embedding_dim", 0)
    heads = w.attribute("num_heads", 0)
    if len(w.shape(x)) == 3 and not heads:
        heads = w.shape(x)[-1] // (size or 2 * w.shape(cos)[-1])
    w.last(
        "RotaryEmbedding",
        x,
        cos,
        sin,
        positions,
        interleaved=w.attribute("interleaved", 0),
        num_heads=heads or None,
        rotary_embedding_dim=size or None,
    )


def grouped_attention(w: Writer) -> None:
    """Causal attention of grouped queries with a cache that each sample fills to its own length."""
    q, k, v, past_k, past_v, lengths, total, cos, sin, positions, added, *_ = w.inputs(
        "query key value past_key past_value seqlens_k total cos sin position_ids bias sink"
    )
    heads, groups = (w.attribute(name, 1) for name in ("num_heads", "kv_num_heads"))
    if w.attribute("smooth_softmax", 0) or w.input(11):
        raise w.refuse("has a sink beside its softmax, which is not supported")
    if not k:
        width = w.shape(q)[-1] // (heads + 2 * groups)
        q, k, v = w.split(q, [heads * width, groups * width, groups * width])
    rows = w.shape(q)[1]
    count = w.known(total)
    if count is None:
        raise w.refuse(f"attends over {total!r} keys, which is not known: give it by --value")
    keys = int(count.reshape(-1)[0])
    # The first of these queries stands after those that the cache holds; at first there are none.
    start = w("Sub", w("Cast", lengths, to=TensorProto.INT64), w.constant(rows - 1))
    start = w("Unsqueeze", w.reshape(start, -1), w.constant([1]))
    if keys == rows:
        start = w.constant(np.zeros((w.shape(q)[0], 1), np.int64))
    own = w("Add", start, w.constant([range(rows)]))
    if w.attribute("do_rotary", 0):
        turn = {"interleaved": w.attribute("rotary_interleaved", 0)}
        placed = [cos, sin, positions or own]
        q = w("RotaryEmbedding", q, *placed, num_heads=heads, **turn)
        k = w("RotaryEmbedding", k, *placed, num_heads=groups, **turn)
    q, k, v = (_heads(w, x, count) for x, count in ((q, heads), (k, groups), (v, groups)))
    held = w.shape(past_k)[2] if past_k else 0
    if held and keys != rows:
        places = w("Unsqueeze", own, w.constant([1, 3]))
        k, v = (_filled(w, past, new, places, keys) for past, new in ((past_k, k), (past_v, v)))
    pads = w.constant([0, 0, 0, 0, 0, 0, max(held - w.shape(k)[2], 0), 0])
    w.last("Pad", k, pads, place=1)
    w.last("Pad", v, pads, place=2)
    window = w.attribute("local_window_size", -1)
    if keys == rows and window < 0:
        return _attended(w, (q, k, v), masks=[], bias=added, causal=True)
    columns = w.constant(np.arange(w.shape(k)[2]))
    last = w("Unsqueeze", own, w.constant([1, 3]))
    masks = [w("LessOrEqual", columns, last)]
    if window >= 0:
        masks.append(w("Greater", columns, w("Sub", last, w.constant(window))))
    return _attended(w, (q, k, v), masks=masks, bias=added)


def _filled(w: Writer, past: str, new: str, places: str, size: int) -> str:
    """A cache of at least `size` places with new keys or values at theirs."""
    missing = max(size - w.shape(past)[2], 0)
    if missing:
        past = w("Pad", past, w.constant([0, 0, 0, 0, 0, 0, missing, 0]))
    places = w("Expand", places, w.constant(w.shape(new)))
    return str(w("ScatterElements", past, places, new, axis=2))


ATTENTIONS: Mapping[str, Callable[[Writer], None]] = {
    "Attention": packed_attention,
    "MultiHeadAttention": multi_head_attention,
    "GroupQueryAttention": grouped_attention,
    "RotaryEmbedding": rotary_embedding,
}
