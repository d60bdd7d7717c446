"""Optimizers over the parameters of a planned module, and those that torch lacks."""

from .documents import Lamb, Momentum
from .local import LocalOptimizer, SummedOptimizer, is_elementwise, local_optimizer

__all__ = ["Lamb", "LocalOptimizer", "Momentum", "SummedOptimizer", "is_elementwise", "local_optimizer"]
