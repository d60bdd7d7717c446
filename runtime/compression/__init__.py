"""Smaller messages and states: gradients as low-rank factors, and an optimizer's moments in 16 bits."""

from .adamw import SmallAdamW
from .low_rank import LowRank
from .minifloat import MEAN, VARIANCE, MiniFloat

__all__ = ["MEAN", "VARIANCE", "LowRank", "MiniFloat", "SmallAdamW"]
