"""Collective communication by hand, in the words of NCCL and MindSpore.

Torch is imported when a function is called.
"""

from .primitives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from .ranks import (
    create_group,
    destroy,
    destroy_group,
    get_group_rank_from_world_rank,
    get_group_size,
    get_rank,
    get_world_rank_from_group_rank,
    init,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "create_group",
    "destroy",
    "destroy_group",
    "gather",
    "get_group_rank_from_world_rank",
    "get_group_size",
    "get_rank",
    "get_world_rank_from_group_rank",
    "init",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
