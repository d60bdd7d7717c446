"""Attention of a transformer layer: projections, positions, the kernel or its pieces, and back."""

from __future__ import annotations

from autopar.costmodel.device.device import TF32
from autopar.costmodel.frameworks.kernels import LIBRARY
from autopar.ir import Value

from .graph_builder import GraphBuilder
from .shape import Latent

FILLED = 2
FILLED_VIEW = 5
"""Passes of the backward pass of filling masked scores in place: a copy is filled; a view takes
three more copies.

Source: torch's masked_fill in derivatives.yaml, CopySlices in csrc/autograd/functions/tensor.cpp.
"""
SKIPPING = 2048
"""The most keys at which the softmax kernel skips the half of the scores behind a causal mask;
above, another kernel runs.
"""


def attend(
    b: GraphBuilder,
    name: str,
    x: str,
    *,
    memory: str = "",
    windowed: bool = False,
    causal: bool = True,
) -> str:
    """Add attention of `x` [batch, sequence, hidden] to itself, or to `memory`.

    `memory`: the results of an encoder.
    """
    q, k, v = _latent(b, name, x, b.shape.latent) if b.shape.latent else _heads(b, name, x, memory)
    context = _core(
        b,
        f"{name}.core",
        (q, k, v),
        window=b.shape.window if windowed else 0,
        causal=causal and not memory,
    )
    batch, heads, length, width = b.size(context)
    rows = b.view(
        f"{name}.back", "aten.transpose.int", context, (batch, length, heads, width), dim0=1, dim1=2
    )
    flat = (batch, length, heads * width)
    # The product's kernel wants rows that lie together: kernels in one piece write them so, batched
    # products do not.
    kind = "aten.view.default" if b.kernels.one_kernel else "aten.clone.default"
    if not b.kernels.one_kernel:
        rows = b.pointwise(f"{name}.contiguous", kind, rows)
    return b.linear(
        f"{name}.out",
        b.view(f"{name}.flatten", "aten.view.default", rows, flat, size=flat),
        b.shape.hidden,
    )


def _heads(b: GraphBuilder, name: str, x: str, memory: str) -> tuple[str, ...]:
    """Add queries of the rows, and keys and values of these or of `memory`.

    Each is [batch, heads, sequence, head size].
    """
    s = b.shape
    bias = s.bias or s.qkv_bias
    groups = s.heads // s.kv_heads
    if not memory and (b.kernels.joined or groups == 1):
        # Each group of heads lies next to its keys and values, so that a rank of a split product
        # has all three.
        whole = b.linear(f"{name}.qkv", x, (s.heads + 2 * s.kv_heads) * s.width, bias=bias)
        both = _headed(b, f"{name}.view", whole, s.kv_heads)
        q, k, v = b.pieces(f"{name}.split", both, (groups * s.width, s.width, s.width))
        if groups > 1:
            spread = (*b.size(q)[:2], s.heads, s.width)
            q = b.view(f"{name}.heads", "aten.reshape.default", q, spread, shape=spread)
    else:
        q = _headed(
            b, f"{name}.q_view", b.linear(f"{name}.query", x, s.heads * s.width, bias=bias), s.heads
        )
        pair = b.linear(f"{name}.keyvalue", memory or x, 2 * s.kv_heads * s.width, bias=bias)
        k, v = b.pieces(
            f"{name}.split", _headed(b, f"{name}.view", pair, s.kv_heads), (s.width, s.width)
        )
    q, k, v = (_to_heads(b, f"{name}.transpose{i}", t) for i, t in enumerate((q, k, v)))
    if s.qk_norm:
        q, k = (b.normalised(f"{name}.norm{i}", t) for i, t in enumerate((q, k)))
    if s.position.startswith("rotary") and not memory:
        q, k = (_rotate(b, f"{name}.rotate{i}", t) for i, t in enumerate((q, k)))
    if b.kernels.repeats_keys and groups > 1:
        k, v = (_repeated(b, f"{name}.repeat{i}", t, groups) for i, t in enumerate((k, v)))
    return q, k, v


def _repeated(b: GraphBuilder, name: str, x: str, times: int) -> str:
    """Add a copy of the keys or values of a group for each of its heads."""
    batch, heads, length, width = b.size(x)
    one = (batch, heads, 1, length, width)
    all_of = (batch, heads, times, length, width)
    flat = (batch, heads * times, length, width)
    x = b.view(f"{name}.one", "aten.unsqueeze.default", x, one, dim=2)
    x = b.view(f"{name}.spread", "aten.expand.default", x, all_of, size=all_of)
    x = b.pointwise(f"{name}.copy", "aten.clone.default", x)
    return b.view(f"{name}.flat", "aten.view.default", x, flat, size=flat)


def _to_heads(b: GraphBuilder, name: str, x: str) -> str:
    batch, length, count, width = b.size(x)
    return b.view(name, "aten.transpose.int", x, (batch, count, length, width), dim0=1, dim1=2)


def _latent(b: GraphBuilder, name: str, x: str, latent: Latent) -> tuple[str, ...]:
    """Add latent attention in training, with keys and values written out for all heads.

    Source: arXiv:2405.04434, equations 9 to 18.
    """
    heads = b.shape.heads
    width = latent.nope + latent.rope
    source = x
    if latent.q_rank:
        source = b.normalised(f"{name}.q_norm", b.linear(f"{name}.q_down", x, latent.q_rank))
    q = _headed(b, f"{name}.q_view", b.linear(f"{name}.query", source, heads * width), heads)
    both = b.linear(f"{name}.kv_down", x, latent.kv_rank + latent.rope)
    down, shared = b.pieces(f"{name}.down", both, (latent.kv_rank, latent.rope))
    up = b.linear(
        f"{name}.kv_up", b.normalised(f"{name}.kv_norm", down), heads * (latent.nope + latent.value)
    )
    k, v = b.pieces(
        f"{name}.up", _headed(b, f"{name}.kv_view", up, heads), (latent.nope, latent.value)
    )
    # All heads share the keys' part with a position: one kernel turns it, another copies it next to
    # that of every head.
    turned = _headed(
        b, f"{name}.rope_view", b.pointwise(f"{name}.rotate1", "aten.neg.default", shared), 1
    )
    spread = (*b.size(k)[:-1], latent.rope)
    k = b.join(
        f"{name}.keys",
        (k, b.view(f"{name}.spread", "aten.expand.default", turned, spread, size=spread)),
    )
    q, k, v = (_to_heads(b, f"{name}.transpose{i}", t) for i, t in enumerate((q, k, v)))
    return b.pointwise(f"{name}.rotate0", "aten.neg.default", q), k, v


def _headed(b: GraphBuilder, name: str, x: str, count: int) -> str:
    """View the columns as `count` heads: [batch, sequence, heads, head size]."""
    batch, length, width = b.size(x)
    out = (batch, length, count, width // count)
    return b.view(name, "aten.view.default", x, out, size=out)


def _rotate(b: GraphBuilder, name: str, x: str) -> str:
    """Rotary positions: one kernel, or x * cos + rotated(x) * sin as five."""
    if b.shape.position == "rotary":  # any kernel that reads and writes once
        return b.pointwise(name, "aten.neg.default", x)
    halves = b.pointwise(f"{name}.neg", "aten.neg.default", x)
    turned = b.pointwise(f"{name}.cat", "aten.clone.default", halves)
    cos = b.op(f"{name}.cos", "aten.mul.Tensor", {"self": x}, b.size(x), other=1.0)[0]
    sin = b.op(f"{name}.sin", "aten.mul.Tensor", {"self": turned}, b.size(x), other=1.0)[0]
    return b.pointwise(f"{name}.sum", "aten.add.Tensor", cos, other=sin)


def _core(
    b: GraphBuilder, name: str, heads: tuple[str, str, str], *, window: int, causal: bool
) -> str:
    """Add attention proper of queries, keys and values [batch, heads, sequence, head size]."""
    q, k, v = heads
    shape = b.size(q)
    keys = b.size(k)
    out = (*shape[:3], b.size(v)[-1])
    if b.kernels.one_kernel:
        # Its kernels draw dropout from a counter: nothing more is read, written or saved.
        return b.op(
            name,
            "aten.scaled_dot_product_attention.default",
            {"query": q, "key": k, "value": v},
            out,
            attn_mask=None,
            is_causal=causal,
            dropout_p=0.0,
            enable_gqa=keys[1] != shape[1],
            kernel=b.kernels.attention,
            window=window,
        )[0]
    grouped = (shape[0], keys[1], shape[1] // keys[1] * shape[2], shape[3])
    if grouped != shape:  # the queries of a group lie behind one another and share its keys
        q = b.view(f"{name}.group", "aten.reshape.default", q, grouped, shape=grouped)
    across = (*keys[:2], keys[3], keys[2])
    turned = b.view(f"{name}.keys", "aten.transpose.int", k, across, dim0=-1, dim1=-2)
    precision: dict[str, Value] = {"compute": TF32} if b.kernels.products == TF32 else {}
    w = b.add(
        f"{name}.scores",
        "aten.matmul.default",
        {"self": q, "other": turned},
        (*grouped[:3], keys[2]),
        precision,
    )[0]
    if b.shape.position == "alibi":  # the bias is laid out whole before the product adds to it
        w = b.pointwise(f"{name}.bias", "aten.clone.default", w)
    w = b.dropout(f"{name}.dropout", _softmax(b, name, w, causal=causal))
    w = b.add(
        f"{name}.context",
        "aten.matmul.default",
        {"self": w, "other": v},
        (*grouped[:3], out[-1]),
        precision,
    )[0]
    return (
        w
        if grouped == shape
        else b.view(f"{name}.ungroup", "aten.reshape.default", w, out, shape=out)
    )


def _softmax(b: GraphBuilder, name: str, w: str, *, causal: bool) -> str:
    """Add scale, mask and softmax: one kernel, or a chain of four.

    The chain is a copy, a masked fill, a softmax in float32 and a cast.
    """
    shape = b.size(w)
    if b.kernels.attention == LIBRARY:
        half = causal and b.kernels.skips_masked and shape[-1] <= SKIPPING
        return b.op(
            f"{name}.softmax", "aten.softmax.int", {"self": w}, shape, dim=-1, is_causal=half
        )[0]
    wide = "float32" if b.dtype == "float32" or b.kernels.skips_masked else None
    if b.dtype != "float32":
        w = b.pointwise(
            f"{name}.copy", "aten.to.dtype" if wide else "aten.clone.default", w, dtype=wide
        )
    # In place on a view of the product, whose gradient is copied, and its part copied, filled and
    # copied back.
    passes = FILLED_VIEW if b.dtype == "float32" else FILLED
    w = b.op(
        f"{name}.mask",
        "aten.mul.Tensor",
        {"self": w},
        shape,
        dtype=wide,
        other=1.0,
        backward_passes=passes,
    )[0]
    w = b.op(f"{name}.softmax", "aten.softmax.int", {"self": w}, shape, dtype="float32", dim=-1)[0]
    return (
        w
        if b.dtype == "float32"
        else b.pointwise(f"{name}.narrow", "aten.to.dtype", w, dtype=b.dtype)
    )
