"""The placement of a global tensor: an array of ranks, with the axes of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RunError, UsageError, unknown
from autopar.runtime.ranks.device_groups import AxisGroup, DeviceGroups
from autopar.runtime.ranks.process_groups import group_of
from autopar.sharding.mesh import Axis, Mesh

DEVICES = ("cuda", "cpu")
Ranks = Sequence[int] | Sequence["Ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlacement:
    """Ranks in row-major order over the axes of `mesh`, on devices of a kind."""

    type: str
    numbers: tuple[int, ...]
    mesh: Mesh

    @property
    def ranks(self) -> list[object]:
        """The ranks as nested lists."""
        nested: list[object] = torch.tensor(self.numbers).view(self.mesh.shape).tolist()
        return nested

    @property
    def here(self) -> bool:
        """Whether this rank is one of them."""
        return _rank() in self.numbers

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return (
            torch.device("cuda", torch.cuda.current_device())
            if self.type == "cuda"
            else torch.device("cpu")
        )

    def groups(self) -> DeviceGroups:
        """The process groups of the axes; this rank is one of their members."""
        return _groups(self, dist.group.WORLD if dist.is_initialized() else None)

    def lines(self, axis: int) -> Iterator[tuple[int, ...]]:
        """The ranks along an axis, line by line."""
        return (tuple(self.numbers[place] for place in line) for line in self.mesh.groups((axis,)))

    def __repr__(self) -> str:
        return f'autopar.placement(type="{self.type}", ranks={self.ranks})'


def placement(type: str, ranks: Ranks) -> TensorPlacement:
    """A placement on these ranks: a list of them, or nested lists for several axes.

    `type`: "cuda" or "cpu".
    """
    if type not in DEVICES:
        raise UsageError(unknown("device type of a placement", type, DEVICES))
    try:
        array = torch.tensor(ranks, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"ranks {ranks!r} are no list of ranks, nor lists of equal length of them"
        ) from error
    array = array if array.dim() else array.view(1)
    numbers = tuple(array.flatten().tolist())
    size = dist.get_world_size() if dist.is_initialized() else 1
    if (
        not numbers
        or len(set(numbers)) != len(numbers)
        or not all(0 <= number < size for number in numbers)
    ):
        raise UsageError(f"ranks {ranks!r} are not distinct ranks from 0 to {size - 1}")
    if type == "cuda" and not torch.cuda.is_available():
        raise RunError(
            'placement("cuda") needs CUDA, which torch does not find here; the nearest is '
            'placement("cpu")'
        )
    mesh = Mesh(
        axes=tuple(Axis(name=f"d{axis}", size=count) for axis, count in enumerate(array.shape))
    )
    checked = TensorPlacement(type=type, numbers=numbers, mesh=mesh)
    for axis in range(len(mesh.axes)):
        for line in checked.lines(axis):
            if list(line) != sorted(line):
                raise UsageError(
                    f"ranks {ranks!r} do not ascend along axis {axis}; the nearest is "
                    f"{sorted(line)} in place of {list(line)}"
                )
    return checked


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@functools.lru_cache(maxsize=64)
def _groups(where: TensorPlacement, world: object) -> DeviceGroups:
    place = where.numbers.index(_rank())
    coordinate = where.mesh.coordinate(place)
    axes = []
    groups = []
    for axis, size in enumerate(where.mesh.shape):
        line = next(line for line in where.lines(axis) if _rank() in line)
        group = group_of(line) if size > 1 else None
        groups.append(group)
        axes.append(
            AxisGroup(str(group.group_name) if group is not None else "", size, coordinate[axis])
        )
    return DeviceGroups(
        mesh=where.mesh,
        rank=_rank(),
        coordinate=coordinate,
        axes=tuple(axes),
        process_groups=tuple(groups),
        first=where.numbers[0],
    )


@functools.lru_cache(maxsize=16)
def device_mesh_of(where: TensorPlacement, world: object) -> DeviceMesh:
    """The ranks as torch's mesh; all ranks make it, since torch makes its groups together."""
    ranks = torch.tensor(where.numbers).view(where.mesh.shape)
    return DeviceMesh(
        where.type, ranks, mesh_dim_names=tuple(axis.name for axis in where.mesh.axes)
    )
