"""Weights in files: paths come in, the slices that this rank holds go out."""

from .module_weights import fill_module, parameters_on_meta, values_from_files
from .piece_tensors import PieceTensor, in_pieces
from .weight_files import FileTensor, read_headers

__all__ = [
    "FileTensor",
    "PieceTensor",
    "fill_module",
    "in_pieces",
    "parameters_on_meta",
    "read_headers",
    "values_from_files",
]
