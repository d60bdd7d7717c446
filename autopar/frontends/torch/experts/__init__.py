"""Layers of experts, written operator by operator, become one operator each."""

from autopar.ir import Graph

from .dense import choose_experts
from .layers import KIND, join_experts
from .weighing import weigh_experts

__all__ = ["join_experts", "with_experts"]


def with_experts(graph: Graph) -> Graph:
    """The graph with every layer of experts as one operator, which weighs its own results."""
    return weigh_experts(join_experts(choose_experts(graph)), KIND)
