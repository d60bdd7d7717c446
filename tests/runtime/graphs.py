"""The small graphs of the runtime's tests."""

from __future__ import annotations

from autopar.ir import Graph
from tests.runtime.helpers import GraphBuilder


def mlp(batch: int = 8, width: int = 8, hidden: int = 16) -> Graph:
    """Two linear layers with biases and a residual; the first weight is used twice."""
    g = GraphBuilder()
    x = g.input("x", batch, 4, width)
    w1 = g.parameter("up.weight", hidden, width)
    b1 = g.parameter("up.bias", hidden)
    w2 = g.parameter("down.weight", width, hidden)
    b2 = g.parameter("down.bias", width)
    h = g.one("aten.linear.default", (batch, 4, hidden), input=x, weight=w1, bias=b1)
    h = g.one("aten.gelu.default", (batch, 4, hidden), self=h)
    y = g.one("aten.linear.default", (batch, 4, width), input=h, weight=w2, bias=b2)
    y = g.one("aten.add.Tensor", (batch, 4, width), self=y, other=x)
    again = g.one("aten.linear.default", (batch, 4, hidden), input=y, weight=w1, bias=None)
    scaled = g.one("aten.mul.Tensor", (batch, 4, hidden), self=again, other=h)
    return g.finish("mlp", [scaled, y])


def embedding(vocabulary: int = 16, width: int = 8) -> Graph:
    """A look-up, tied to the output projection."""
    g = GraphBuilder()
    ids = g.input("ids", 4, 8, dtype="int64")
    table = g.parameter("table.weight", vocabulary, width)
    scale = g.parameter("norm.weight", width)
    h = g.one("aten.embedding.default", (4, 8, width), weight=table, indices=ids, padding_idx=3)
    h = g.one(
        "aten.layer_norm.default",
        (4, 8, width),
        input=h,
        normalized_shape=(width,),
        weight=scale,
        bias=None,
        eps=1e-5,
    )
    logits = g.one("aten.linear.default", (4, 8, vocabulary), input=h, weight=table, bias=None)
    return g.finish("embedding", [logits])


def attention(batch: int = 4, sequence: int = 8, heads: int = 4, width: int = 4) -> Graph:
    """A causal attention block with a fused projection, views, a mask from nothing, and a mean."""
    g = GraphBuilder()
    model = heads * width
    x = g.input("x", batch, sequence, model)
    fused = g.parameter("qkv.weight", 3 * model, model)
    bias = g.parameter("qkv.bias", 3 * model)
    out = g.parameter("out.weight", model, model)
    qkv = g.one(
        "aten.linear.default", (batch, sequence, 3 * model), input=x, weight=fused, bias=bias
    )
    parts = g.call(
        "aten.split.Tensor", [(batch, sequence, model)] * 3, self=qkv, split_size=model, dim=-1
    )
    views = []
    for part in parts:
        v = g.one(
            "aten.view.default",
            (batch, sequence, heads, width),
            self=part,
            size=(batch, sequence, heads, width),
        )
        views.append(
            g.one("aten.transpose.int", (batch, heads, sequence, width), self=v, dim0=1, dim1=2)
        )
    ones = g.one(
        "aten.ones.default",
        (sequence, sequence),
        makes="bool",
        size=(sequence, sequence),
        dtype="bool",
    )
    mask = g.one("aten.tril.default", (sequence, sequence), makes="bool", self=ones)
    a = g.one(
        "aten.scaled_dot_product_attention.default",
        (batch, heads, sequence, width),
        query=views[0],
        key=views[1],
        value=views[2],
        attn_mask=mask,
    )
    a = g.one("aten.transpose.int", (batch, sequence, heads, width), self=a, dim0=1, dim1=2)
    a = g.one(
        "aten.reshape.default", (batch, sequence, model), self=a, shape=(batch, sequence, model)
    )
    y = g.one("aten.linear.default", (batch, sequence, model), input=a, weight=out, bias=None)
    y = g.one("aten.add.Tensor", (batch, sequence, model), self=y, other=x)
    pooled = g.one("aten.mean.dim", (batch, model), self=y, dim=(1,), keepdim=False)
    return g.finish("attention", [pooled, y])


def convolution() -> Graph:
    """Plain, grouped and depthwise convolutions, a group norm, and a pooled mean."""
    g = GraphBuilder()
    x = g.input("x", 4, 4, 6, 6)
    w1 = g.parameter("conv1.weight", 8, 4, 3, 3)
    b1 = g.parameter("conv1.bias", 8)
    w2 = g.parameter("conv2.weight", 8, 2, 3, 3)
    w3 = g.parameter("conv3.weight", 8, 1, 3, 3)
    n1 = g.parameter("norm.weight", 8)
    n2 = g.parameter("norm.bias", 8)
    shape = (4, 8, 6, 6)
    same = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    h = g.one("aten.conv2d.default", shape, input=x, weight=w1, bias=b1, groups=1, **same)
    h = g.one("aten.group_norm.default", shape, input=h, num_groups=4, weight=n1, bias=n2, eps=1e-5)
    h = g.one("aten.conv2d.default", shape, input=h, weight=w2, bias=None, groups=4, **same)
    h = g.one("aten.silu.default", shape, self=h)
    h = g.one("aten.conv2d.default", shape, input=h, weight=w3, bias=None, groups=8, **same)
    pooled = g.one("aten.mean.dim", (4, 8, 1, 1), self=h, dim=(-1, -2), keepdim=True)
    spread = g.one("aten.expand.default", shape, self=pooled, size=(4, 8, 6, 6))
    y = g.one("aten.mul.Tensor", shape, self=spread, other=h)
    cut = g.one("aten.slice.Tensor", (4, 8, 6, 3), self=y, dim=3, start=1, end=4)
    full = g.one("aten.slice.Tensor", (4, 8, 6, 3), self=cut, dim=1, start=0, end=8)
    return g.finish("convolution", [full])


GRAPHS = {"mlp": mlp, "embedding": embedding, "attention": attention, "convolution": convolution}
