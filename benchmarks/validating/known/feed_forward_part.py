"""The feed-forward part of a transformer layer: dense, or experts with a router."""

from __future__ import annotations

from autopar.ir import Ref, Value

from .graph_builder import GraphBuilder
from .placements import INNER, ROWS, SUM, expert_rows, tokens

GROUPED = "aten._grouped_mm.default"


def feed_forward(b: GraphBuilder, name: str, x: str, width: int) -> str:
    """Two products with an activation between, or three with a gate."""
    if not b.shape.gated:
        h = b.pointwise(
            f"{name}.gelu", "aten.gelu.default", b.linear(f"{name}.up", x, width, INNER), INNER
        )
        return b.linear(f"{name}.down", h, b.shape.hidden, SUM)
    gate, up = _gate_and_up(b, name, x, width)
    gate = b.pointwise(f"{name}.silu", "aten.silu.default", gate, INNER)
    return b.linear(
        f"{name}.down",
        b.pointwise(f"{name}.mul", "aten.mul.Tensor", gate, INNER, other=up),
        b.shape.hidden,
        SUM,
    )


def _gate_and_up(b: GraphBuilder, name: str, x: str, width: int) -> tuple[str, str]:
    if not b.kernels.joined:
        rows = b.size(x)
        own = (
            x
            if b.shape.shared_input
            else b.view(f"{name}.own", "aten.view.default", x, rows, ROWS, size=rows)
        )
        return b.linear(f"{name}.gate", own, width, INNER), b.linear(f"{name}.up", x, width, INNER)
    # Columns of gate and up alternate, so that every rank of a split product has both.
    both = b.linear(f"{name}.up", x, 2 * width, INNER)
    pairs = (*b.size(x)[:-1], width, 2)
    paired = b.view(f"{name}.pairs", "aten.view.default", both, pairs, INNER, size=pairs)
    halves = b.pieces(f"{name}.half", paired, (1, 1), INNER)
    flat = (*b.size(x)[:-1], width)
    first, second = (
        b.view(f"{name}.flat{i}", "aten.view.default", h, flat, INNER, size=flat)
        for i, h in enumerate(halves)
    )
    return first, second


def experts(b: GraphBuilder, name: str, x: str) -> str:
    """Add a router, experts on the rows of their tokens, and the sum of each token's results.

    No token is dropped. An expert of every token is added if the shape has one.
    """
    s = b.shape
    batch, length, whole = b.size(x)
    count = batch * length
    width = s.expert_ffn or s.ffn
    hidden = s.expert_hidden or whole
    share = _router(b, name, x)
    small = b.linear(f"{name}.narrow_rows", x, hidden, ROWS, bias=False) if s.expert_hidden else x
    flat = b.view(
        f"{name}.tokens",
        "aten.view.default",
        small,
        (count, hidden),
        tokens(batch),
        size=(count, hidden),
    )
    chosen = b.given(f"{name}.chosen", (count * s.top_k,))
    # The weight of each row: its gradient flows back to the router.
    narrow = b.pointwise(f"{name}.narrow", "aten.to.dtype", share, ROWS, dtype=b.dtype)
    each = (batch, length, s.top_k)
    narrow = b.view(f"{name}.of_each", "aten.expand.default", narrow, each, ROWS, size=each)
    every = (count * s.top_k,)
    weights = b.view(f"{name}.weights", "aten.reshape.default", narrow, every, ROWS, size=every)
    rows = _layer(b, name, flat, chosen, weights, width)
    whole_rows = (batch, length, hidden)
    total = b.view(f"{name}.sum", "aten.view.default", rows, whole_rows, SUM, size=whole_rows)
    if s.expert_hidden:
        total = b.linear(f"{name}.widen_rows", total, whole, SUM, bias=False)
    if not s.shared_ffn:
        return total
    return b.pointwise(
        f"{name}.shared.add",
        "aten.add.Tensor",
        feed_forward(b, f"{name}.shared", x, s.shared_ffn),
        SUM,
        other=total,
    )


def _router(b: GraphBuilder, name: str, x: str) -> str:
    """Add the scores of the experts and the choice of the best, [batch, sequence, 1]."""
    batch, length, _ = b.size(x)
    scores = b.linear(f"{name}.router", x, b.shape.experts, ROWS, bias=False)
    scores = b.op(
        f"{name}.scores",
        "aten.softmax.int",
        {"self": scores},
        b.size(scores),
        ROWS,
        dtype="float32",
        dim=-1,
    )[0]
    # Stands in for the choice of the best scores, which reads the same.
    return b.op(
        f"{name}.share",
        "aten.sum.dim_IntList",
        {"self": scores},
        (batch, length, 1),
        ROWS,
        dtype="float32",
        dim=(-1,),
        keepdim=True,
    )[0]


def _layer(b: GraphBuilder, name: str, flat: str, chosen: str, weights: str, width: int) -> str:
    """Add all experts, and the weighed sums of each token's results, as one operator."""
    s = b.shape
    columns = 2 * width if s.gated else width
    hidden = b.size(flat)[1]
    operands = (
        b.weight(f"{name}.up.weight", s.experts, hidden, columns),
        b.weight(f"{name}.down.weight", s.experts, width, hidden),
    )
    first = (
        GROUPED,
        (("self", "%rows"), ("mat2", "%w0"), ("offs", "%ends")),
        ((columns, b.dtype, "(!c=2 f)" if s.gated else "f"),),
    )
    middle: tuple[Value, ...]
    if s.gated:
        halves = (
            "aten.chunk.default",
            (("self", "%0"), ("chunks", 2), ("dim", -1)),
            ((width, b.dtype, "f"), (width, b.dtype, "f")),
        )
        silu = ("aten.silu.default", (("self", "%1"),), ((width, b.dtype, "f"),))
        product = ("aten.mul.Tensor", (("self", "%3"), ("other", "%2")), ((width, b.dtype, "f"),))
        middle = (halves, silu, product)
        last = "%4"
    else:
        middle = (("aten.gelu.default", (("self", "%0"),), ((width, b.dtype, "f"),)),)
        last = "%1"
    final = (
        GROUPED,
        (("self", last), ("mat2", "%w1"), ("offs", "%ends")),
        ((hidden, b.dtype, "!o"),),
    )
    attributes: dict[str, Value] = {
        "rows": Ref(0),
        "chosen": Ref(1),
        "operands": (Ref(2), Ref(3)),
        "scores": Ref(4),
        "network": (first, *middle, final),
        **b.of_products(name),
    }
    rows = b.result(name, (b.size(flat)[0], hidden))
    inputs = (flat, chosen, *operands, weights)
    return b.append(name, "autopar.experts", inputs, rows, expert_rows(b.batch), attributes)[0]
