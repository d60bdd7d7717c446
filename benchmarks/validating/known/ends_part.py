"""Both ends of a transformer: the embedding of tokens or patches, and the head with its loss."""

from __future__ import annotations

from .graph_builder import GraphBuilder

COLOURS = 3


def embed(b: GraphBuilder, name: str, length: int) -> str:
    """Rows [batch, length, hidden] of tokens, or of patches of images."""
    s = b.shape
    if s.patch:
        pixels = b.given(f"{name}.patches", (b.batch, length, COLOURS * s.patch * s.patch), b.dtype)
        x = b.linear(f"{name}.lookup", pixels, s.hidden)
    else:
        tokens = b.given("tokens" if name == "embed" else f"{name}.tokens", (b.batch, length))
        # An encoder and its decoder share one table.
        if "embed.weight" not in b.tensors:
            b.weight("embed.weight", s.vocab, s.hidden)
        inputs = {"weight": "embed.weight", "indices": tokens}
        x = b.op(f"{name}.lookup", "aten.embedding.default", inputs, (b.batch, length, s.hidden))[0]
    if s.position == "learned":
        table = b.weight(f"{name}.position", length, s.hidden)
        x = b.op(
            f"{name}.add",
            "aten.add.Tensor",
            {"self": x, "other": table},
            (b.batch, length, s.hidden),
        )[0]
    return b.dropout(f"{name}.dropout", x)


def head(b: GraphBuilder, name: str, x: str, labels: str) -> str:
    """The loss: logits of every token, or of the mean of the patches."""
    s = b.shape
    h = b.normalised(f"{name}.norm", x)
    if s.patch:
        one = (b.batch, 1, s.hidden)
        h = b.op(f"{name}.mean", "aten.mean.dim", {"self": h}, one, dim=(1,), keepdim=True)[0]
    rows = b.size(h)[1]
    # Further heads (`mtp`) use the same table.
    weight = "embed.weight" if s.tied else "head.logits.weight"
    if weight not in b.tensors:
        b.weight(weight, s.vocab, s.hidden)
    given = {"input": h, "weight": weight}
    logits = b.add(
        f"{name}.logits",
        "aten.linear.default",
        given,
        (b.batch, rows, s.vocab),
        b.of_products(f"{name}.logits"),
    )[0]
    dtype = "float32" if b.kernels.wide_loss else b.dtype
    if s.gathered_logits or b.kernels.wide_loss:
        logits = b.pointwise(f"{name}.float", "aten.to.dtype", logits, dtype=dtype)
    flat = (b.batch * rows, s.vocab)
    logits = b.op(
        f"{name}.view", "aten.view.default", {"self": logits}, flat, dtype=dtype, size=flat
    )[0]
    inputs = {"self": logits, "target": labels}
    return b.op(
        f"{name}.loss", "aten.cross_entropy_loss.default", inputs, (), dtype=dtype, reduction=2
    )[0]
