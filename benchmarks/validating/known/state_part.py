"""State-space layers (Mamba-2): a convolution along the sequence and a scan in chunks.

Of a chunk of Q rows, with the inputs x [Q, w] of a group's heads (w columns together), its keys B
and queries C [Q, n]:

    states = B^T x                     [n, w], summed up over the chunks, one behind the other
    y      = (C B^T, masked) x + C states

T. Dao and A. Gu, "Transformers are SSMs" (arXiv:2405.21060), section 6. Its kernels are in
`device/scan_kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.sharding.rules.recurrent import STATE_SPACE, TRITON_SCAN

from .graph_builder import GraphBuilder
from .shape import StateSpace

"""In the names of operators that the kernels compute again backward, without keeping anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Operands of a scan: inputs, keys and queries side by side for each group, and its steps."""

    mixed: str
    steps: str


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
    flat = b.linear(f"{name}.in", x, m.groups * (own + joined + each), bias=False)
    view = (batch, length, m.groups, own + joined + each)
    grouped = b.view(f"{name}.groups", "aten.view.default", flat, view, size=view)
    gate, mixed, steps = b.pieces(f"{name}.split", grouped, (own, joined, each))
    # The convolution is a few elements wide: one kernel with its activation, bound by its traffic.
    mixed = b.pointwise(f"{name}.scan.convolution", "aten.silu.default", mixed)
    y = _scan(b, f"{name}.scan", Rows(mixed=mixed, steps=steps), m)
    y = b.pointwise(f"{name}.scan.gate", "aten.mul.Tensor", y, other=gate)
    y = b.normalised(f"{name}.norm", y)
    rows = (batch, length, m.inner)
    y = b.view(f"{name}.flatten", "aten.view.default", y, rows, size=rows)
    return b.linear(f"{name}.out", y, b.shape.hidden, bias=False)


def _scan(b: GraphBuilder, name: str, rows: Rows, m: StateSpace) -> str:
    """The scan of rows of heads, to results [batch, sequence, heads, width]."""
    batch, length, groups, _ = b.size(rows.mixed)
    own = m.inner // groups
    x, keys, queries = b.pieces(f"{name}.pieces", rows.mixed, (own, m.size, m.size))
    each = (batch, length, m.heads, m.width)
    one = (batch, length, m.heads)
    inputs = {
        "x": b.view(f"{name}.heads", "aten.view.default", x, each, size=each),
        "step": b.view(f"{name}.step", "aten.view.default", rows.steps, one, size=one),
        "decay": b.weight(f"{name}.decay", m.heads),
        "key": keys,
        "query": queries,
        "skip": b.weight(f"{name}.skip", m.heads),
        "bias": b.weight(f"{name}.bias", m.heads),
    }
    made = b.op(
        f"{name}.chunks",
        STATE_SPACE,
        inputs,
        each,
        kernel=TRITON_SCAN,
        chunk_size=min(m.chunk, length),
    )[0]
    whole = (batch, length, groups, own)
    return b.view(f"{name}.whole", "aten.view.default", made, whole, size=whole)
