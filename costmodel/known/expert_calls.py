"""The number of calls that a host issues for a layer of experts, which the graph has as one."""

from __future__ import annotations

from .configuration import Configuration
from .shape import Shape

EXPERT_OPERATORS = 20
"""Operators of a layer of experts besides its products: sorts of rows, exchanges, activation.

Counted in megatron/core/transformer/moe: token_dispatcher.py and moe_utils.py (fused permutation).
"""
EXPERT_PRODUCTS = 2
"""Products of an expert: each a call of its own, as is the cast of its rows (TransformerEngine,
GroupedLinear).
"""


def calls_of_experts(shape: Shape, c: Configuration) -> int:
    """Calls that a layer of experts issues in a pass on one device."""
    ranks = c.expert_data * (c.tensor if c.whole_experts else 1)
    own = -(-shape.experts // ranks)
    # Products of cast operands have a call for the cast as well.
    calls_of_product = 2 if c.kernels.products else 1
    return EXPERT_OPERATORS + EXPERT_PRODUCTS * own * calls_of_product
