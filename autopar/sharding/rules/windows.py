"""Sliding windows along the spatial dims of a call: the rows that an output shard reads, and the
spelling of the dims.

With X input rows, Y output rows, stride s, dilation d, kernel k and `before` rows of padding,
output row j reads the input rows j·s - before ... j·s - before + (k-1)·d. Where X = Y·s, a shard of
the output rows reads the input rows of the same shard, `before` rows of the shard before it and
(k-1)·d - before - (s-1) rows of the shard behind it (negative: it skips its own last rows). A
transposed convolution, where Y = X·s, mirrors this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .registry import Call

CAUSAL = "autopar.causal_conv1d"
"""A convolution along one dim, of which each row reads its own row and those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window along one spatial dim of `rows` input rows and `made` output rows; sizes are in
    rows.
    """

    rows: int
    made: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    transposed: bool = False

    @property
    def span(self) -> int:
        """Rows from the first to the last that the window reads."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def aligned(self) -> bool:
        """Whether a shard of the output needs the equal shard of the input, apart from a halo."""
        # Negative padding crops rows, so that shards of the output would not begin where those of
        # the input do.
        many, few = (self.made, self.rows) if self.transposed else (self.rows, self.made)
        return many == few * self.stride and self.before >= 0 and self.after >= 0

    @property
    def low(self) -> int:
        """Input rows that a shard needs of the shard before it."""
        return (
            max(0, (self.span - 1 - self.before) // self.stride) if self.transposed else self.before
        )

    @property
    def high(self) -> int:
        """Input rows that a shard needs of the shard behind it; negative: own rows that it does not
        need.
        """
        return (
            max(0, -(-self.before // self.stride))
            if self.transposed
            else self.span - self.before - self.stride
        )

    @property
    def apart(self) -> bool:
        """Whether shards need no halo and no padding."""
        return self.aligned and self.before == 0 and self.span <= self.stride

    @property
    def most(self) -> int:
        """The most shards: the rows needed lie in one neighbour, and a shard has two output rows at
        least.
        """
        return min(self.rows // max(self.low, self.high, 1), self.made // 2) if self.aligned else 1


def windows_of(call: Call) -> tuple[Window, ...]:
    """The windows of a convolution or pool, one a spatial dim; empty where the padding is not
    written out.
    """
    kind = call.operator.kind
    transposed = "ranspose" in kind
    # `aten.convolution` says by an attribute that it is transposed; its space is not split.
    if call.get("transposed"):
        return ()
    given = call.get("kernel_size")
    weight = call.position("weight")
    kernel = call.inputs[weight].shape[2:] if weight is not None else _sizes(given, _space(call), 1)
    space = len(kernel)
    strides = _sizes(call.get("stride"), space, 1 if weight is not None else None)
    # The default stride of a pool in torch is its kernel.
    strides = strides or kernel
    dilations = _sizes(call.get("dilation"), space, 1)
    pads = _padding(call, kernel, dilations)
    if pads is None:
        return ()
    rows = call.inputs[0].shape[-space:]
    made = call.outputs[0].shape[-space:]
    return tuple(
        Window(
            rows=rows[i],
            made=made[i],
            kernel=kernel[i],
            stride=strides[i],
            dilation=dilations[i],
            before=pads[0][i],
            after=pads[1][i],
            transposed=transposed,
        )
        for i in range(space)
    )


def window_index(factor: str) -> int:
    """The index of the spatial dim that a factor of `spell` belongs to.

    >>> window_index("y1")
    1
    """
    return int(factor[1:])


def _space(call: Call) -> int:
    return next(d for d in (1, 2, 3) if f"{d}d" in call.operator.kind)


def _sizes(value: object, space: int, default: int | None) -> tuple[int, ...]:
    """One size for each spatial dim, from a number or a tuple; empty if neither a value nor a
    default is given.
    """
    if isinstance(value, tuple):
        given = value
    else:
        given = () if value is None else (value,)
    numbers = tuple(int(v) for v in given if isinstance(v, int))
    if not numbers:
        return () if default is None else (default,) * space
    return numbers * space if len(numbers) == 1 else numbers


def _padding(
    call: Call, kernel: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rows of padding before and behind each spatial dim; None where `auto_pad` decides them."""
    space = len(kernel)
    padding = call.get("padding")
    total = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    if call.operator.kind == CAUSAL:
        return tuple(total), (0,) * space
    if padding == "same":
        # An odd row of padding goes behind, as in torch.
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    sizes = _sizes(None if isinstance(padding, str) else padding, space, 0)
    return sizes, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spots:
    """The spatial dims of a rule: terms of the input, terms of the output, and the clauses that
    belong to them.
    """

    ins: str
    outs: str
    clauses: tuple[str, ...]


def spell(windows: Sequence[Window], space: int) -> Spots:
    """Terms of every spatial dim: split alike if shards are apart, with a halo if they touch, else
    whole.
    """
    ins = []
    outs = []
    clauses = []
    for i in range(space):
        window = windows[i] if windows else None
        few, many = (
            (f"x{i}", f"y{i}") if window is not None and window.transposed else (f"y{i}", f"x{i}")
        )
        # Without a halo the dim is split as any other, and the split costs no communication.
        if window is not None and window.apart and min(window.rows, window.made) > 1:
            grown = few if window.stride == 1 else f"({few} !{many}={window.stride})"
            ins.append(few if window.transposed else grown)
            outs.append(grown if window.transposed else few)
        elif window is not None and window.most > 1:
            ins.append(f"!x{i}")
            outs.append(f"y{i}")
            clauses.append(f"y{i} + x{i}: halo")
        else:
            ins.append(f"!x{i}")
            outs.append(f"!y{i}")
    return Spots(ins=" ".join(ins), outs=" ".join(outs), clauses=tuple(clauses))
