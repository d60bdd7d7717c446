"""Sharding rules by family; importing this package fills the table."""

from . import contraction, convolution, creation, elementwise, indexing, normalization, reduction, selection, shape
from .registry import RULES, Call, Entry, check_supported, preamble, register, rule_of, tensors_with_gradient

__all__ = [
    "RULES", "Call", "Entry", "check_supported", "contraction", "convolution", "creation", "elementwise", "indexing",
    "normalization", "preamble", "reduction", "register", "rule_of", "selection", "shape", "tensors_with_gradient",
]  # fmt: skip
