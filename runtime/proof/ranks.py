"""Ranks as threads of one process with real Gloo groups, for operators that communicate inside themselves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from ..collective_log import CollectiveLog
from ..collectives import AxisGroup

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=60)


@functools.cache
def axis_groups(mesh: tuple[int, ...]) -> tuple[tuple[AxisGroup, ...], ...]:
    """The groups of every rank of a mesh, one an axis, made once and kept."""
    coordinates = [tuple(c) for c in torch.cartesian_prod(*(torch.arange(n) for n in mesh)).reshape(-1, len(mesh)).tolist()]
    stores = {
        (axis, *at[:axis], -1, *at[axis + 1 :]): _distributed_c10d.HashStore() for at in coordinates for axis in range(len(mesh))
    }  # fmt: skip

    def connect(rank: int) -> tuple[AxisGroup, ...]:
        at = coordinates[rank]
        made = []
        for axis, size in enumerate(mesh):
            store = stores[(axis, *at[:axis], -1, *at[axis + 1 :])]
            name = f"proof {'x'.join(map(str, mesh))} rank {rank} axis {axis}"
            group = dist.ProcessGroup(store, at[axis], size)
            gloo = dist.ProcessGroupGloo(store, at[axis], size, _TIMEOUT)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._set_group_name(cast(Any, name))
            _distributed_c10d._register_process_group(cast(Any, name), group)
            made.append(AxisGroup(name, size, at[axis]))
            _KEPT.append(group)
        return tuple(made)

    return tuple(in_threads(len(coordinates), connect))


_KEPT: list[dist.ProcessGroup] = []


class AxisLog(CollectiveLog):  # type: ignore[no-untyped-call]
    """A log for the groups of `axis_groups`: `ranks` holds the axis."""

    def members(self, name: Any) -> tuple[int, ...]:
        """The group's axis, from its name."""
        return (int(name.rpartition(" ")[2]),)


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run `work(rank)` for all ranks at once; the first error, if any, is raised here."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(count)]
