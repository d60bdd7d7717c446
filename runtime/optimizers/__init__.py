"""Optimizers over the parameters of a planned module, and those that torch lacks."""

from .lamb_momentum import Lamb, Momentum
from .muon import Muon, muon_groups
from .shard_optimizer import LocalOptimizer, SummedOptimizer, is_elementwise, local_optimizer

__all__ = [
    "Lamb",
    "LocalOptimizer",
    "Momentum",
    "Muon",
    "SummedOptimizer",
    "is_elementwise",
    "local_optimizer",
    "muon_groups",
]
