"""The order of a step, executed.

A plan and a batch come in, outputs and gradients of this rank go out.
"""

from .autograd_node import differentiable_call
from .collective_log import CollectiveLog
from .engine import Engine

__all__ = ["CollectiveLog", "Engine", "differentiable_call"]
