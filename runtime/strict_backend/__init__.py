"""The backend `strict`, which holds programs on CPUs to the rules of NCCL."""

from .backend import NAME, init_process_group
from .lateness import Clock, holding
from .progress import RuleBroken

__all__ = ["NAME", "Clock", "RuleBroken", "holding", "init_process_group"]
