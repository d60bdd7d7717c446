"""Ranks as threads of one process with real Gloo groups, for operators that communicate inside."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.sharding.mesh import Axes, Axis, Mesh, axis_sets

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=60)


def axis_groups(mesh: tuple[int, ...]) -> tuple[Mapping[Axes, AxisGroup], ...]:
    """The groups of every rank of a mesh, over every axis and every set of several.

    They are made once for each mesh.
    """
    groups = _connected(mesh)
    for name, group in _GROUPS.items():
        try:
            _distributed_c10d._resolve_process_group(cast(Any, name))
        except RuntimeError:
            # The end of the default group takes all names out of torch's registry.
            _distributed_c10d._register_process_group(cast(Any, name), group)
    return groups


@functools.cache
def _connected(mesh: tuple[int, ...]) -> tuple[Mapping[Axes, AxisGroup], ...]:
    axes_of_mesh = (Axis(name=f"d{axis}", size=size) for axis, size in enumerate(mesh))
    whole_mesh = Mesh(axes=tuple(axes_of_mesh))
    sets = axis_sets(mesh)
    stores = {
        (axes, group): _distributed_c10d.HashStore()
        for axes in sets
        for group in whole_mesh.groups(axes)
    }

    def connect(rank: int) -> Mapping[Axes, AxisGroup]:
        """The groups of one rank, under names that torch's functional collectives know."""
        by_axes = {}
        for axes in sets:
            members = next(group for group in whole_mesh.groups(axes) if rank in group)
            store = stores[axes, members]
            place = members.index(rank)
            size = len(members)
            name = f"proof {'x'.join(map(str, mesh))} rank {rank} axes {','.join(map(str, axes))}"
            group = dist.ProcessGroup(store, place, size)
            gloo = dist.ProcessGroupGloo(store, place, size, _TIMEOUT)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._set_group_name(cast(Any, name))
            _GROUPS[name] = group
            by_axes[axes] = AxisGroup(name, size, place)
        return by_axes

    return tuple(in_threads(whole_mesh.devices, connect))


# Torch's registry of groups by name does not keep them alive.
_GROUPS: dict[str, dist.ProcessGroup] = {}


class AxisLog(CollectiveLog):  # type: ignore[no-untyped-call]
    """A log for the groups of `axis_groups`: `ranks` holds the axes."""

    def members(self, name: Any) -> tuple[int, ...]:
        """The group's axes, from its name."""
        return tuple(map(int, name.rpartition(" ")[2].split(",")))


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run `work(rank)` for all ranks at once; the first error, if any, is raised here."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        """Do the work of one rank, and note how it went."""
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
        # The first rank's error: others mostly report that their connection broke.
        raise errors[min(errors)]
    return [results[rank] for rank in range(count)]
