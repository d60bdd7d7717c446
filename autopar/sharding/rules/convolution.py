"""Rules of convolutions and pooling: batch and channels can be split, the space stays whole."""

from __future__ import annotations

from .registry import Call, register


def _convolution(call: Call) -> str:
    """`n c y x, o c u v, +o -> n o y x | c: sum`; with groups the outer part of both channel dims."""
    space = len(call.inputs[1].shape) - 2
    groups = call.integer("groups", "group", default=1)
    batch = "n " if len(call.inputs[0].shape) == space + 2 else ""
    ins = " ".join(f"!x{i}" for i in range(space))
    window = " ".join(f"!u{i}" for i in range(space))
    outs = " ".join(f"!y{i}" for i in range(space))
    if groups == 1:
        return f"{batch}c {ins}, o c {window}, +o -> {batch}o {outs} | c: sum"
    depthwise = call.inputs[1].shape[1] == 1
    channel = "g" if depthwise else f"(g={groups} !c)"
    out = "g" if call.inputs[1].shape[0] == groups else f"(g={groups} !o)"
    return f"{batch}{channel} {ins}, {out} {'1' if depthwise else '!c'} {window}, {out} -> {batch}{out} {outs}"


def _pool(call: Call) -> str:
    """Pooling works on each channel of each image on its own."""
    rank = len(call.inputs[0].shape)
    space = 1 if "1d" in call.operator.kind else 3 if "3d" in call.operator.kind else rank - 2 if "onnx" in call.operator.kind else 2
    lead = " ".join(f"d{i}" for i in range(rank - space))
    ins = " ".join(f"!x{i}" for i in range(space))
    outs = " ".join(f"!y{i}" for i in range(space))
    return f"{lead} {ins} -> " + ", ".join(f"{lead} {outs}" for _ in call.outputs)


_CONVOLUTIONS = "aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv2d.padding aten.conv1d.padding onnx.Conv"
register(_CONVOLUTIONS, _convolution, products=("x",))
register(
    [f"aten.{name}{d}d.default" for name in ("max_pool", "avg_pool", "adaptive_avg_pool") for d in (1, 2, 3)]
    + ["onnx.MaxPool", "onnx.AveragePool", "onnx.GlobalAveragePool", "onnx.GlobalMaxPool", "onnx.LRN"],
    lambda call: _lrn(call) if call.operator.kind == "onnx.LRN" else _pool(call),
)


def _lrn(call: Call) -> str:
    """Local response normalisation looks across channels."""
    dims = " ".join(["n", "!c", *(f"x{i}" for i in range(len(call.inputs[0].shape) - 2))])
    return f"{dims} -> {dims}"
