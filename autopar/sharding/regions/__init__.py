"""Regions: operators whose strategies follow from the strategy of one of them."""

from .groups import regions_of
from .joint import Joint, Region, joint_options, joint_strategies

__all__ = ["Joint", "Region", "joint_options", "joint_strategies", "regions_of"]
