"""Rules of convolutions and pooling: batch, channels, and space where equal shards of input and
output match.
"""

from __future__ import annotations

from .registry import Call, register
from .spelling import whole
from .windows import CAUSAL, Spots, spell, windows_of


def convolution_dims(
    image: tuple[int, ...], kernel: tuple[int, ...], groups: int, spots: Spots | None = None
) -> tuple[str, str, str, str]:
    """Dims of `n c y x, o c u v, o -> n o y x`: image, kernel, bias and output.

    With groups, the group is the outer part of both channel dims. Spatial dims are whole except in
    `spots`.
    """
    space = len(kernel) - 2
    batch = "n " if len(image) == space + 2 else ""
    window = whole(kernel[2:], "u")
    ins, outs = (
        (spots.ins, spots.outs)
        if spots is not None
        else (whole(kernel[2:], "x"), whole(kernel[2:], "y"))
    )
    if groups == 1:
        return f"{batch}c {ins}", f"o c {window}", "o", f"{batch}o {outs}"
    # Both channel dims are split between groups alone, as a rank with whole groups runs a
    # convolution with fewer groups. With one input channel a group, the channels are the groups.
    depthwise = kernel[1] == 1
    channel = "g" if depthwise else f"(g={groups} !c)"
    out = "g" if kernel[0] == groups else f"(g={groups} !o)"
    return (
        f"{batch}{channel} {ins}",
        f"{out} {'1' if depthwise else '!c'} {window}",
        out,
        f"{batch}{out} {outs}",
    )


def _convolution(call: Call) -> str:
    """The sum over the channels is split only where there are no groups; the bias is added once."""
    groups = call.integer("groups", default=1)
    shape = call.inputs[1].shape
    spots = spell(windows_of(call), len(shape) - 2)
    image, kernel, channel, out = convolution_dims(call.inputs[0].shape, shape, groups, spots)
    # Of groups each rank has all channels that its filters read, so nothing is summed over ranks.
    addend, reduced = ("+", ["c: sum"]) if groups == 1 else ("", [])
    return f"{image}, {kernel}, {addend}{channel} -> {out} | " + "; ".join(
        [*reduced, *spots.clauses]
    )


def _transposed(call: Call) -> str:
    """`n c y x, c o u v, +o -> n o y x | c: sum`; of groups, the outer part of both channels."""
    space = len(call.inputs[1].shape) - 2
    groups = call.integer("groups", default=1)
    batch = "n " if len(call.inputs[0].shape) == space + 2 else ""
    window = whole(call.inputs[1].shape[2:], "u")
    spots = spell(windows_of(call), space)
    if groups == 1:
        clauses = "; ".join(["c: sum", *spots.clauses])
        return f"{batch}c {spots.ins}, c o {window}, +o -> {batch}o {spots.outs} | {clauses}"
    channel = f"(g={groups} !c)"
    out = f"(g={groups} !o)"
    sides = (
        f"{batch}{channel} {spots.ins}, {channel} !o {window}, {out} -> {batch}{out} {spots.outs}"
    )
    return f"{sides} | " + "; ".join(spots.clauses)


def _pool(call: Call) -> str:
    """Pooling works on each channel of each image on its own."""
    kind = call.operator.kind
    rank = len(call.inputs[0].shape)
    # The kinds name the number of spatial dims, as the batch dim may be missing.
    space = next((count for count in (1, 3) if f"{count}d" in kind), 2)
    lead = " ".join(f"d{i}" for i in range(rank - space))
    if "adaptive" in kind:
        return _adaptive(call, lead, space)
    # Space is whole where a part's results would differ from those of the whole image. Indices (a
    # second output) count from the image's corner, and a mean of integers is rounded only once.
    has_indices = len(call.outputs) > 1
    rounds = not call.inputs[0].is_float and "max" not in kind
    spots = spell(() if has_indices or rounds else windows_of(call), space)
    return (
        f"{lead} {spots.ins} -> "
        + ", ".join(f"{lead} {spots.outs}" for _ in call.outputs)
        + " | "
        + "; ".join(spots.clauses)
    )


def _adaptive(call: Call, lead: str, space: int) -> str:
    """A mean over all the space is a mean over its shards; equal blocks of rows can be split
    between the blocks.
    """
    sizes = zip(call.inputs[0].shape[-space:], call.outputs[0].shape[-space:], strict=True)
    ins = []
    outs = []
    means = []
    for i, (rows, made) in enumerate(sizes):
        if made == 1 and rows > 1 and "avg" in call.operator.kind:
            ins.append(f"x{i}")
            # Shards are of equal size, so the mean of their means is the mean of all.
            outs.append("1")
            means.append(f"x{i}: mean")
        elif made > 1 and rows % made == 0:
            ins.append(f"y{i}" if rows == made else f"(y{i} !x{i}={rows // made})")
            outs.append(f"y{i}")
        else:
            ins.append(f"!x{i}")
            outs.append(f"!y{i}")
    return f"{lead} {' '.join(ins)} -> {lead} {' '.join(outs)} | " + "; ".join(means)


# The kernel meets each place of the output, so places of the input (x) do not count as work; a
# transposed one meets each place of the input.
_CONVOLUTIONS = (
    "aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv2d.padding "
    f"aten.conv1d.padding {CAUSAL}"
)
register(_CONVOLUTIONS, _convolution, products=("x",))
_TRANSPOSED = (
    "aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input"
)
register(_TRANSPOSED, _transposed, products=("y",))
register(
    "aten.convolution.default aten._convolution.default",
    lambda call: _transposed(call) if call.get("transposed") else _convolution(call),
    products=("x",),
)
register(
    [
        f"aten.{name}{d}d.default"
        for name in ("max_pool", "avg_pool", "adaptive_avg_pool")
        for d in (1, 2, 3)
    ],
    _pool,
)
