"""Every ONNX operator as a torch function, called with its attributes by their formal names.

Shapes come from the tensors given, which may be local shards, or from attributes that the caller
has made local.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch

Function = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]

_FAMILIES = (
    "attention casts contraction detection elementwise features indexing losses normalization "
    "quantization recurrent reduction shape signal state training windows"
)


def _table() -> dict[str, Function]:
    functions: dict[str, Function] = {}
    for family in _FAMILIES.split():
        for name, function in import_module(f"{__name__}.{family}").FUNCTIONS.items():
            # Other domains than the default one are written out.
            kind = name if "." in name else f"onnx.{name}"
            if kind in functions:
                raise ValueError(f"two functions are registered for {kind}")
            functions[kind] = function
    return functions


ONNX_FUNCTIONS: Mapping[str, Function] = _table()
