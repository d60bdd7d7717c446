"""The backend `strict`, which holds programs on CPUs to the rules of NCCL."""

from .backend import NAME, init_process_group
from .progress import RuleBroken

__all__ = ["NAME", "RuleBroken", "init_process_group"]
