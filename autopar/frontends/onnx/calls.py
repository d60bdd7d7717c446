"""`Call`: an ONNX operator on its way into the graph, with its arguments by formal name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from autopar.errors import ModelError
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
        "num_mel_bins",
        "dft_length",
        "sample_rate",
        "lower_edge_hertz",
        "upper_edge_hertz",
    ),
    "Range": ("start", "limit", "delta"),
    "SplitToSequence": ("split",),
    "SequenceAt": ("position",),
    **{
        f"Reduce{kind}": ("axes",)
        for kind in (
            "Sum",
            "Mean",
            "Max",
            "Min",
            "Prod",
            "L1",
            "L2",
            "LogSum",
            "LogSumExp",
            "SumSquare",
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
    {
        "K",
        "depth",
        "axis",
        "k",
        "dft_length",
        "frame_step",
        "frame_length",
        "start",
        "limit",
        "delta",
        "position",
        "constant_value",
        "min",
        "max",
        "ratio",
        "training_mode",
    }
)

_WHOLE = frozenset({"K", "depth", "axis", "k"})


@dataclass(slots=True, kw_only=True)
class Call:
    """One operator on its way into the graph."""

    op_type: str
    version: int
    where: str
    arguments: dict[str, Argument]
    outputs: list[Val]
    wanted: list[bool] = field(default_factory=list)

    def tensor(self, name: str) -> Val:
        """The tensor argument called `name`."""
        value = self.arguments[name]
        if not isinstance(value, Val):
            raise ModelError(f"{self.where}: {name!r} is not a tensor")
        return value

    def first(self) -> Val:
        """The first tensor argument."""
        for value in self.arguments.values():
            if isinstance(value, Val):
                return value
            if isinstance(value, tuple) and value and isinstance(value[0], Val):
                return value[0]
        raise ModelError(f"{self.where} has no tensor input")

    def integer(self, name: str, default: int = 0) -> int:
        """An integer argument."""
        value = self.arguments.get(name)
        return value if isinstance(value, int) else default

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A tuple of integers, or None where absent."""
        value = self.arguments.get(name)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            raise ModelError(f"{self.where}: {name!r} must be a list of integers")
        return tuple(int(item) for item in value if isinstance(item, int))

    def floats(self, name: str) -> tuple[float, ...] | None:
        """A tuple of floats, or None where absent."""
        value = self.arguments.get(name)
        if isinstance(value, tuple):
            return tuple(float(item) for item in value if isinstance(item, int | float))
        return None


def folded(name: str, array: np.ndarray) -> Value:
    """A known argument as an attribute: one number where the operator takes one, else a tuple."""
    items = array.ravel().tolist()
    if name in _WHOLE:
        items = [int(item) for item in items]
    return items[0] if name in _SINGLE and len(items) == 1 else tuple(items)
