"""Operators that onnxruntime adds to files (com.microsoft), spelled by those of the standard."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.frontends.onnx.writer import Writer

from .attention import ATTENTIONS
from .fused import FUSED
from .quantized import QUANTIZED

_TABLE = {**ATTENTIONS, **FUSED, **QUANTIZED}
OPERATORS: Mapping[tuple[str, str], Callable[[Writer], None]] = {
    **{("com.microsoft", name): write for name, write in _TABLE.items()},
    # The tools write these into the default domain, too.
    **{("", name): FUSED[name] for name in FUSED if "SimplifiedLayer" in name},
}
"""The operators by domain and name; each writes standard ones in its place."""
