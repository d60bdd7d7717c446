"""Proofs of sharding rules: an operator executed shard by shard must equal the whole.

Values and gradients are compared.
"""

from .execution import Disproved, Execution, decisions, prove, strategies, with_gradient
from .sample import Sample, sample
from .shards import assemble, hold, shard

__all__ = [
    "Disproved",
    "Execution",
    "Sample",
    "assemble",
    "decisions",
    "hold",
    "prove",
    "sample",
    "shard",
    "strategies",
    "with_gradient",
]
