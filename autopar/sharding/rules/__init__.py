"""Sharding rules by family; importing this package fills the table."""

from autopar.ir import Graph

from . import (
    bodies,
    complex,
    contraction,
    convolution,
    creation,
    elementwise,
    experts,
    fused,
    gather_scatter,
    indexing,
    linalg,
    losses,
    moving,
    noise,
    normalization,
    quantization,
    recurrent,
    reduction,
    resampling,
    saved_experts,
    saved_scans,
    scans,
    selection,
    shape,
)
from .registry import (
    RULES,
    Call,
    Entry,
    check_supported,
    is_product,
    known_rule,
    preamble,
    products_of,
    register,
    rule_of,
    tensors_of_parameters,
    tensors_with_gradient,
    without_parameters,
    without_rule,
)

__all__ = [
    "RULES",
    "Call",
    "Entry",
    "added_rules",
    "bodies",
    "check_supported",
    "complex",
    "contraction",
    "convolution",
    "creation",
    "elementwise",
    "experts",
    "fused",
    "gather_scatter",
    "indexing",
    "is_product",
    "known_rule",
    "linalg",
    "losses",
    "moving",
    "noise",
    "normalization",
    "preamble",
    "products_of",
    "quantization",
    "recurrent",
    "reduction",
    "register",
    "resampling",
    "rule_of",
    "saved_experts",
    "saved_scans",
    "scans",
    "selection",
    "shape",
    "tensors_of_parameters",
    "tensors_with_gradient",
    "without_parameters",
    "without_rule",
]

_OURS = frozenset(RULES)


def added_rules(graph: Graph) -> dict[str, Entry]:
    """The rules of a graph's kinds that are in no table here: users' own, and found ones."""
    kinds = {operator.kind for operator in graph.operators} - _OURS
    return {kind: RULES[kind] for kind in sorted(kinds) if kind in RULES}
