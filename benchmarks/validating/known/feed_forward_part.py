"""The feed-forward part of a transformer layer: dense, or experts with a router."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Ref, Value
from autopar.sharding.rules.experts import BIAS

from .graph_builder import GraphBuilder

GROUPED = "aten._grouped_mm.default"


def feed_forward(b: GraphBuilder, name: str, x: str, width: int) -> str:
    """Two products with an activation between, or three with a gate."""
    if not b.shape.gated:
        h = b.pointwise(f"{name}.gelu", "aten.gelu.default", b.linear(f"{name}.up", x, width))
        return b.linear(f"{name}.down", h, b.shape.hidden)
    gate, up = _gate_and_up(b, name, x, width)
    gate = b.pointwise(f"{name}.silu", "aten.silu.default", gate)
    return b.linear(
        f"{name}.down",
        b.pointwise(f"{name}.mul", "aten.mul.Tensor", gate, other=up),
        b.shape.hidden,
    )


def _gate_and_up(b: GraphBuilder, name: str, x: str, width: int) -> tuple[str, str]:
    if not b.kernels.joined:
        rows = b.size(x)
        own = (
            x
            if b.shape.shared_input
            else b.view(f"{name}.own", "aten.view.default", x, rows, size=rows)
        )
        return b.linear(f"{name}.gate", own, width), b.linear(f"{name}.up", x, width)
    # Columns of gate and up alternate, so that every rank of a split product has both.
    both = b.linear(f"{name}.up", x, 2 * width)
    pairs = (*b.size(x)[:-1], width, 2)
    paired = b.view(f"{name}.pairs", "aten.view.default", both, pairs, size=pairs)
    halves = b.pieces(f"{name}.half", paired, (1, 1))
    flat = (*b.size(x)[:-1], width)
    first, second = (
        b.view(f"{name}.flat{i}", "aten.view.default", h, flat, size=flat)
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
    small = b.linear(f"{name}.narrow_rows", x, hidden, bias=False) if s.expert_hidden else x
    flat = b.view(
        f"{name}.tokens", "aten.view.default", small, (count, hidden), size=(count, hidden)
    )
    chosen = b.given(f"{name}.chosen", (count * s.top_k,))
    # The weight of each row: its gradient flows back to the router.
    narrow = b.pointwise(f"{name}.narrow", "aten.to.dtype", share, dtype=b.dtype)
    each = (batch, length, s.top_k)
    narrow = b.view(f"{name}.of_each", "aten.expand.default", narrow, each, size=each)
    every = (count * s.top_k,)
    weights = b.view(f"{name}.weights", "aten.reshape.default", narrow, every, size=every)
    rows = _layer(b, name, flat, chosen, weights, width)
    whole_rows = (batch, length, hidden)
    total = b.view(f"{name}.sum", "aten.view.default", rows, whole_rows, size=whole_rows)
    if s.expert_hidden:
        total = b.linear(f"{name}.widen_rows", total, whole, bias=False)
    if not s.shared_ffn:
        return total
    return b.pointwise(
        f"{name}.shared.add",
        "aten.add.Tensor",
        feed_forward(b, f"{name}.shared", x, s.shared_ffn),
        other=total,
    )


def _router(b: GraphBuilder, name: str, x: str) -> str:
    """Add the scores of the experts and the choice of the best, [batch, sequence, 1]."""
    batch, length, _ = b.size(x)
    scores = b.linear(f"{name}.router", x, b.shape.experts, bias=False)
    scores = b.op(
        f"{name}.scores",
        "aten.softmax.int",
        {"self": scores},
        b.size(scores),
        dtype="float32",
        dim=-1,
    )[0]
    # Stands in for the choice of the best scores, which reads the same.
    return b.op(
        f"{name}.share",
        "aten.sum.dim_IntList",
        {"self": scores},
        (batch, length, 1),
        dtype="float32",
        dim=(-1,),
        keepdim=True,
    )[0]


def _layer(b: GraphBuilder, name: str, flat: str, chosen: str, weights: str, width: int) -> str:
    """Add all experts, and the weighed sums of each token's results, as one operator."""
    s = b.shape
    columns = 2 * width if s.gated else width
    hidden = b.size(flat)[1]
    operands = [
        b.weight(f"{name}.up.weight", s.experts, hidden, columns),
        b.weight(f"{name}.down.weight", s.experts, width, hidden),
    ]
    if s.bias:
        operands.append(b.weight(f"{name}.up.bias", s.experts, columns))
        operands.append(b.weight(f"{name}.down.bias", s.experts, hidden))
    up = "(!c=2 f)" if s.gated else "f"
    network: list[Inside] = [_product("%rows", "%w0", (columns, b.dtype, up))]
    network += _added(network, "%w2", (columns, b.dtype, up)) if s.bias else []
    source = f"%{len(network) - 1}"
    inner = (width, b.dtype, "f")
    if s.gated:
        halves = (("self", source), ("chunks", 2), ("dim", -1))
        network.append(("aten.chunk.default", halves, (inner, inner)))
        # A chunk has two results.
        first = len(network) - 1
        network.append(("aten.silu.default", (("self", f"%{first}"),), (inner,)))
        both = (("self", f"%{first + 2}"), ("other", f"%{first + 1}"))
        network.append(("aten.mul.Tensor", both, (inner,)))
        source = f"%{first + 3}"
    else:
        network.append(("aten.gelu.default", (("self", source),), (inner,)))
        source = f"%{len(network) - 1}"
    network.append(_product(source, "%w1", (hidden, b.dtype, "!o")))
    if s.bias:
        network += _added(network, "%w3", (hidden, b.dtype, "!o"))
    attributes: dict[str, Value] = {
        "rows": Ref(0),
        "chosen": Ref(1),
        "operands": tuple(Ref(2 + place) for place in range(len(operands))),
        "scores": Ref(2 + len(operands)),
        "network": tuple(network),
        **b.of_products(name),
    }
    rows = b.result(name, (b.size(flat)[0], hidden))
    inputs = (flat, chosen, *operands, weights)
    return b.append(name, "autopar.experts", inputs, rows, attributes)[0]


Inside = tuple[str, tuple[tuple[str, Value], ...], tuple[tuple[int, str, str], ...]]
"""A call inside an expert: its kind, arguments, and width, type and dims of its results."""


def _product(rows: str, weight: str, result: tuple[int, str, str]) -> Inside:
    return GROUPED, (("self", rows), ("mat2", weight), ("offs", "%ends")), (result,)


def _selected(table: str, result: tuple[int, str, str]) -> Inside:
    return BIAS, (("self", table), ("dim", 0), ("index", "%experts")), (result,)


def _added(network: Sequence[Inside], table: str, result: tuple[int, str, str]) -> list[Inside]:
    """A bias of each expert, added to the last result."""
    last = sum(len(results) for _, _, results in network) - 1
    sides = (("self", f"%{last}"), ("other", f"%{last + 1}"))
    return [_selected(table, result), ("aten.add.Tensor", sides, (result,))]
