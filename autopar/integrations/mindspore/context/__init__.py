"""MindSpore's auto-parallel context over plans.

It has the keys, their state, and their effect on a call of `autopar.plan`.
"""

from .state import (
    Context,
    current,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_context,
    target_backend,
)

__all__ = [
    "Context",
    "current",
    "get_auto_parallel_context",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_context",
    "target_backend",
]
