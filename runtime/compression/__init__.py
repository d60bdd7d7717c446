"""Smaller messages and states.

Gradients travel as low-rank factors, and an optimizer's moments are kept in 16 bits.
"""

from autopar.runtime.parameters.low_rank import LowRank

from .adamw import SmallAdamW
from .minifloat import MEAN, VARIANCE, MiniFloat

__all__ = ["MEAN", "VARIANCE", "LowRank", "MiniFloat", "SmallAdamW"]
