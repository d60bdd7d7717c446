"""State-space layers (Mamba-2): a convolution along the sequence and a scan in chunks.

Of a chunk of Q rows, with the inputs x [Q, w] of a group's heads (w columns together), its keys B
and queries C [Q, n]:

    states = B^T x                     [n, w], summed up over the chunks, one behind the other
    y      = (C B^T, masked) x + C states

T. Dao and A. Gu, "Transformers are SSMs" (arXiv:2405.21060), section 6. Kernels:
state-spaces/mamba, ssd_combined.py, whose backward pass computes all this again. No table has
measurements of them, so they are priced as batched products: assumed.
"""

from __future__ import annotations

from .graph_builder import GraphBuilder
from .placements import CHUNKED, CHUNKS, GROUPED, INNER, SUM
from .shape import StateSpace

SCAN = ".scan."
"""In the names of operators that the kernels compute again backward, without keeping anything."""


def state_space(b: GraphBuilder, name: str, x: str) -> str:
    """The mixer of a layer, from rows [batch, sequence, hidden] to such rows."""
    m = b.shape.state
    assert m is not None, "a pattern with state-space layers has their sizes"
    batch, length, _ = b.size(x)
    own = m.inner // m.groups
    each = m.heads // m.groups
    joined = own + 2 * m.size
    # Each group's gate, inputs, keys, queries and steps lie side by side, so that a rank of a split
    # product has whole groups.
    flat = b.linear(f"{name}.in", x, m.groups * (own + joined + each), INNER, bias=False)
    view = (batch, length, m.groups, own + joined + each)
    grouped = b.view(f"{name}.groups", "aten.view.default", flat, view, GROUPED, size=view)
    gate, mixed, _ = b.pieces(f"{name}.split", grouped, (own, joined, each), GROUPED)
    # The convolution is a few elements wide: one kernel with its activation, bound by its traffic.
    mixed = b.pointwise(f"{name}.scan.convolution", "aten.silu.default", mixed, GROUPED)
    y = _scan(b, f"{name}.scan", mixed, m)
    y = b.pointwise(f"{name}.scan.gate", "aten.mul.Tensor", y, GROUPED, other=gate)
    y = b.normalised(f"{name}.norm", y, GROUPED)
    rows = (batch, length, m.inner)
    y = b.view(f"{name}.flatten", "aten.view.default", y, rows, INNER, size=rows)
    return b.linear(f"{name}.out", y, b.shape.hidden, SUM, bias=False)


def _scan(b: GraphBuilder, name: str, mixed: str, m: StateSpace) -> str:
    """The scan of rows [batch, sequence, groups, inputs + keys + queries]."""
    batch, length, groups, joined = b.size(mixed)
    rows = min(m.chunk, length)
    chunks = length // rows
    own = joined - 2 * m.size
    apart = (batch, chunks, rows, groups, joined)
    x = b.view(f"{name}.chunks", "aten.view.default", mixed, apart, CHUNKS, size=apart)
    x, keys, queries = (
        b.view(
            f"{name}.turn{i}",
            "aten.transpose.int",
            part,
            (batch, chunks, groups, rows, b.size(part)[-1]),
            CHUNKED,
            dim0=2,
            dim1=3,
        )
        for i, part in enumerate(b.pieces(f"{name}.pieces", x, (own, m.size, m.size), CHUNKS))
    )
    across = (batch, chunks, groups, m.size, rows)
    turned = b.view(f"{name}.keys", "aten.transpose.int", keys, across, CHUNKED, dim0=-1, dim1=-2)

    def product(what: str, left: str, right: str) -> str:
        out = (*b.size(left)[:-1], b.size(right)[-1])
        return b.op(
            f"{name}.{what}", "aten.matmul.default", {"self": left, "other": right}, out, CHUNKED
        )[0]

    # Summing the states up over the chunks reads and writes them once.
    passed = b.pointwise(
        f"{name}.passed", "aten.clone.default", product("states", turned, x), CHUNKED
    )
    inside = product("inside", product("scores", queries, turned), x)
    y = b.pointwise(
        f"{name}.sum", "aten.add.Tensor", product("outside", queries, passed), CHUNKED, other=inside
    )
    back = (batch, chunks, rows, groups, own)
    y = b.view(f"{name}.back", "aten.transpose.int", y, back, CHUNKS, dim0=2, dim1=3)
    whole = (batch, length, groups, own)
    return b.view(f"{name}.whole", "aten.reshape.default", y, whole, GROUPED, shape=whole)


def scan_flops(m: StateSpace) -> float:
    """FLOPs of a token's forward pass through the scan."""
    return 2.0 * (m.chunk * (m.groups * m.size + m.inner) + 2 * m.size * m.inner)
