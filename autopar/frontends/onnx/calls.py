"""Arguments of ONNX operators by their formal names, and which of them must be known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from autopar.ir.graph import Value

from .values import Val

Argument: TypeAlias = "Val | tuple[Val, ...] | Value"

# Formal inputs that must be known, and formal inputs that are folded if they are known.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "Squeeze": ("axes",),
    "Unsqueeze": ("axes",),
    "Slice": ("starts", "ends", "axes", "steps"),
    "Split": ("split",),
    "Tile": ("repeats",),
    "Pad": ("pads", "axes"),
    "Resize": ("roi", "scales", "sizes"),
    "Upsample": ("scales",),
    "TopK": ("K",),
    "OneHot": ("depth",),
    "ConstantOfShape": ("input",),
    "CumSum": ("axis",),
    "CumProd": ("axis",),
    "Trilu": ("k",),
    "CenterCropPad": ("shape",),
    "AffineGrid": ("size",),
    "Col2Im": ("image_shape", "block_shape"),
    "MaxUnpool": ("output_shape",),
    "DFT": ("dft_length", "axis"),
    "STFT": ("frame_step", "frame_length"),
    "BlackmanWindow": ("size",),
    "HannWindow": ("size",),
    "HammingWindow": ("size",),
    "MelWeightMatrix": (
        *("num_mel_bins", "dft_length", "sample_rate"),
        *("lower_edge_hertz", "upper_edge_hertz"),
    ),
    "Range": ("start", "limit", "delta"),
    "SplitToSequence": ("split",),
    "SequenceAt": ("position",),
    **{
        f"Reduce{kind}": ("axes",)
        for kind in (
            *("Sum", "Mean", "Max", "Min", "Prod"),
            *("L1", "L2", "LogSum", "LogSumExp", "SumSquare"),
        )
    },
}
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "Reshape": ("shape",),
    "Expand": ("shape",),
    "Pad": ("constant_value",),
    "Clip": ("min", "max"),
    "Dropout": ("ratio", "training_mode"),
}
_SINGLE = frozenset(
    (
        *("K", "depth", "axis", "k", "dft_length", "frame_step", "frame_length", "start", "limit"),
        *("delta", "position", "constant_value", "min", "max", "ratio", "training_mode"),
    )
)
_WHOLE = frozenset({"K", "depth", "axis", "k"})


def folded(name: str, array: np.ndarray) -> Value:
    """A known argument as an attribute: one number where the operator takes one, else a tuple."""
    items = array.ravel().tolist()
    if name in _WHOLE:
        items = [int(item) for item in items]
    return items[0] if name in _SINGLE and len(items) == 1 else tuple(items)
