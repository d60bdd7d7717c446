"""MindSpore's strategy checkpoints, in JSON and in protobuf: read, written, and made of a plan."""

from .made import strategies_of_plan
from .records import (
    OperatorStrategy,
    ParameterLayout,
    Strategies,
    read_strategies,
    write_strategies,
)

__all__ = [
    "OperatorStrategy",
    "ParameterLayout",
    "Strategies",
    "read_strategies",
    "strategies_of_plan",
    "write_strategies",
]
