"""Collective communication by hand; `autopar.integrations.communication` holds the functions."""

from __future__ import annotations

from .integrations.communication import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    create_group,
    destroy,
    destroy_group,
    gather,
    get_group_rank_from_world_rank,
    get_group_size,
    get_rank,
    get_world_rank_from_group_rank,
    init,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
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
