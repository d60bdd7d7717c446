"""Tensors that scans of linear attention and of state spaces hold for the backward pass.

A scan keeps its inputs, and computes the rest again; meanwhile it holds, of every row of a head
with keys of width w, values of width e and chunks of Q rows, so many numbers of single precision:

    delta rule     14 w + 4 e + 6 Q + w e / Q
    state space     8 w + 3 e + 5 Q + w e / Q
    delta rule in which every channel decays      6.5 w Q, of the decays between rows

Of the first two autograd saves 10 w + 3 e + 6 Q + w e / Q and 6 w + e + 3 Q + w e / Q, counted
exactly; the rest are gradients on their way, as torch's tracker of memory sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import DTYPE_BYTES

from .recurrent import DELTA_RULE, STATE_SPACE, TRITON_SCAN
from .registry import Call
from .saved_for_backward import OWN, Keeps, Made, Own, Saving

CHANNEL_ROWS = 16
"""Rows of a chunk where every channel decays, as in `torch_operators.chunked`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of a scan. `heads`, `values`: inputs with an element for each row of a head, and with
    its values. `itemsize`: bytes of a number in a state, of single precision at least.
    """

    heads: int
    values: int
    width: int
    rows: int
    channels: bool
    itemsize: float
    delta: bool

    @classmethod
    def of(cls, call: Call) -> _Sizes:
        delta = call.operator.kind == DELTA_RULE
        names = ("beta", "value", "key", "decay") if delta else ("step", "x", "key", "decay")
        places = [place for place in map(call.position, names) if place is not None]
        heads, values, key, decay = places
        channels = delta and len(call.inputs[decay].shape) == 4
        rows = min(call.integer("chunk_size", default=64), call.inputs[heads].shape[1])
        return cls(
            heads=heads,
            values=values,
            width=call.inputs[key].shape[-1],
            rows=min(rows, CHANNEL_ROWS) if channels else rows,
            channels=channels,
            itemsize=float(max(DTYPE_BYTES[call.inputs[values].dtype], 4)),
            delta=delta,
        )

    def made(self, position: int, numbers: float, *, split: bool, gathered: bool = False) -> Made:
        """`numbers` for each element of an input; `split`: only where the sequence is split."""
        return Made(
            output=False,
            position=position,
            nbytes=numbers * self.itemsize,
            passed=("t",) if split else (),
            gathered=gathered,
        )


def _keeps(call: Call, gradients: Sequence[bool], saving: Saving) -> Keeps:
    """The inputs.

    Where the sequence is split, also what every shard makes of the state [w, e] before it, and of a
    delta rule what its own rows read of that, w numbers each.
    """
    size = _Sizes.of(call)
    # A state is multiplied by a matrix, or by a number for each head, which takes a column.
    columns = size.width if size.delta else 1
    made = [
        size.made(size.values, size.width, split=True, gathered=True),
        size.made(size.heads, size.width * columns, split=True, gathered=True),
    ]
    made += [size.made(size.heads, size.width, split=True)] * size.delta
    return Keeps(inputs=tuple(range(len(call.inputs))), made=tuple(made))


def _scratch(call: Call, saving: Saving) -> tuple[Made, ...]:
    """Buffers that are held while the rest is computed again."""
    size = _Sizes.of(call)
    width = size.width
    rows = size.rows
    if call.get("kernel") == TRITON_SCAN:
        # States and their gradients, and both in 16 bits.
        return (size.made(size.values, 3 * width / rows, split=False),)
    if not size.delta:
        return (
            size.made(size.heads, 8 * width + 5 * rows, split=False),
            size.made(size.values, 3 + width / rows, split=False),
        )
    if size.channels:
        return (size.made(size.heads, 6.5 * width * rows, split=False),)
    return (
        size.made(size.heads, 14 * width + 6 * rows, split=False),
        size.made(size.values, 4 + width / rows, split=False),
        # A shard of the sequence has w more columns of values.
        size.made(size.heads, width * (4 + width / rows), split=True),
    )


OWN.update(dict.fromkeys((DELTA_RULE, STATE_SPACE), Own(keeps=_keeps, scratch=_scratch)))
