"""All families of local forms; importing them fills the table."""

from ..split_operators import halo, loss, ring, rows, scans, softmax, statistics
from . import attention_dropout, drawn, dropout, experts, lookup, onnx_places, own_functions, placed_reads, seeded, sizes

__all__ = [
    "attention_dropout",
    "drawn",
    "dropout",
    "experts",
    "halo",
    "lookup",
    "loss",
    "onnx_places",
    "own_functions",
    "placed_reads",
    "ring",
    "rows",
    "scans",
    "seeded",
    "sizes",
    "softmax",
    "statistics",
]
