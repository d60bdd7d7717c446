"""GSPMD's tile assignments as XLA prints them: `{devices=[2,1,4]<=[2,4] last_tile_dim_replicate}`.

The list counts the tiles of every dim, and the copies last. The devices are an iota reshaped to
`<=[...]`, with its axes permuted by `T(...)`, read in row-major order.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

from autopar.errors import RuleError
from autopar.sharding.layout import Kind, Layout

from .place import Place, axes_of, no_partial, whole_splits

_TEXT = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]<=\[(?P<iota>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?(?P<copies> "
    r"?last_tile_dim_replicate)?\}"
)
MOST = 1 << 20
"""Devices beyond which a text is none of this world."""


def write(layout: Layout, place: Place) -> str:
    """Replicated tensors are `{replicated}`."""
    whole_splits(layout, "GSPMD")
    no_partial(
        layout,
        "GSPMD",
        "shardy's unreduced={...} can say it; else give it as it is after its sum (R)",
    )
    sizes = place.mesh.shape
    dims = axes_of(layout, place.rank)
    if not any(dims):
        return "{replicated}"
    copies = tuple(
        axis for axis, placement in enumerate(layout) if placement.kind is not Kind.SPLIT
    )
    tiles = [math.prod(sizes[axis] for axis in axes) for axes in dims]
    rest = math.prod(sizes[axis] for axis in copies)
    order = [*itertools.chain.from_iterable(dims), *copies]
    turned = f"T({_joined(order)})" if order != sorted(order) else ""
    replicated = ""
    if rest > 1:
        tiles.append(rest)
        replicated = " last_tile_dim_replicate"
    return f"{{devices=[{_joined(tiles)}]<=[{_joined(sizes)}]{turned}{replicated}}}"


def _joined(numbers: list[int] | tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def read(text: str, place: Place) -> Layout:
    """The layout that puts every shard on the device that the text gives it."""
    if text.strip() == "{replicated}":
        return place.from_dims([[] for _ in range(place.rank)], text=text)
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise RuleError(
            f"{text!r} is not of the form {{devices=[2,1,4]<=[2,4]T(1,0) last_tile_dim_replicate}}"
        )
    tiles, iota = (tuple(map(int, match[name].split(","))) for name in ("tiles", "iota"))
    order = (
        tuple(map(int, match["order"].split(","))) if match["order"] else tuple(range(len(iota)))
    )
    counts = tiles[:-1] if match["copies"] else tiles
    devices = place.mesh.devices
    if (
        math.prod(tiles) != devices
        or math.prod(iota) != devices
        or devices > MOST
        or sorted(order) != list(range(len(iota)))
    ):
        raise RuleError(f"{text!r} does not assign the {devices} devices of the mesh {place.mesh}")
    if len(counts) != place.rank:
        raise RuleError(f"{text!r} has {len(counts)} dims, the tensor has {place.rank}")
    wanted = _sets(np.arange(devices).reshape(iota).transpose(order).reshape(math.prod(counts), -1))
    sizes = place.mesh.shape
    # An axis of one device splits nothing, and so is taken to hold copies.
    for owners in itertools.product(
        *(range(place.rank + 1) if size > 1 else (place.rank,) for size in sizes)
    ):
        dims = [
            [axis for axis, owner in enumerate(owners) if owner == dim] for dim in range(place.rank)
        ]
        if all(
            math.prod(sizes[axis] for axis in axes) == count
            for axes, count in zip(dims, counts, strict=True)
        ):
            copies = [axis for axis, owner in enumerate(owners) if owner == place.rank]
            turned = (
                np.arange(devices)
                .reshape(sizes)
                .transpose([*itertools.chain.from_iterable(dims), *copies])
            )
            if np.array_equal(_sets(turned.reshape(math.prod(counts), -1)), wanted):
                return place.from_dims(dims, text=text)
    raise RuleError(
        f"{text!r}: no layout on the mesh {place.mesh} puts these shards there; give a mesh with "
        "the axes of its list"
    )


def _sets(devices: np.ndarray) -> np.ndarray:
    """The devices of every tile, in any order."""
    return np.sort(devices, axis=1)
