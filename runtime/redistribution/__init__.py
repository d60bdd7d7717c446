"""Tensors brought from one layout to another.

A shard and a chain of actions come in, the new shard goes out.
"""

from .flat_messages import Moving, carry
from .steps import apply_chain, gather_full, whole_chain

__all__ = ["Moving", "apply_chain", "carry", "gather_full", "whole_chain"]
