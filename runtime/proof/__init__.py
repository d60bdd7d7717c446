"""Proving sharding rules: an operator executed shard by shard equals the whole, values and gradients."""

from .execution import Disproved, Execution, assemble, decisions, hold, prove, shard, strategies, with_gradient
from .sample import Sample, sample

__all__ = ["Disproved", "Execution", "Sample", "assemble", "decisions", "hold", "prove", "sample", "shard", "strategies", "with_gradient"]
