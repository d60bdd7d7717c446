"""The device of this rank: its own, or an error on every rank that says what is missing.

The launcher numbers the ranks of a machine. Some launchers show each rank one device only, which is
then device 0 of its process whatever its number is. Ranks that would share a device are refused:
they would fill the memory of one, while the others stand idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from autopar.errors import RunError

from .backends import device_type
from .launchers import LaunchedRank

PATIENCE = timedelta(seconds=30)
"""The time for which rank 0 waits until all ranks have read why they cannot run."""
_VERDICT = "verdict"
_NAMED = 4
"""The number of ranks that an error names."""


@dataclass(slots=True)
class _Own:
    """The device of this rank in the present process group of all ranks."""

    world: Any = None
    device: torch.device | None = None


_OWN = _Own()


def device_number(launched: LaunchedRank | None, count: int) -> int:
    """The number of this rank's device among the `count` that its process sees.

    Raises `RunError` if the launcher does not tell enough.
    """
    if launched is None:
        return 0
    local = launched.local_rank
    if local is None:
        if count == 1 or launched.world == 1:
            return 0
        raise RunError(
            f"rank {launched.rank} of {launched.world} sees {count} devices, and nothing tells "
            "which is its own: set LOCAL_RANK (0 if it is the only rank of its machine), start "
            "with torchrun, or show each rank one device (CUDA_VISIBLE_DEVICES)"
        )
    shared = launched.local_world is None or launched.local_world <= count
    if shared and local < count:
        return local
    # Each rank is shown devices of its own.
    if count == 1 or not shared:
        return 0
    raise RunError(
        f"local rank {local} has no device: its process sees {count}; start at most {count} ranks "
        "on this machine, or show each rank one device (CUDA_VISIBLE_DEVICES)"
    )


def own_device(kind: str) -> torch.device:
    """The device that the launcher gives this process, made current."""
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    number = device_number(LaunchedRank.of(os.environ), module.device_count())
    # Libraries work on the current device; without this all ranks would use the first.
    module.set_device(number)
    return torch.device(kind, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A rank's claim to a device.

    `device`: a name that no other device of any machine has; "" for the CPU. `error`: why the rank
    has no device.
    """

    backend: str
    device: str = ""
    error: str = ""
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def of(cls, backend: str, device: torch.device) -> Claim:
        """The claim to a device of this process."""
        return cls(backend=backend, device="" if device.type == "cpu" else _identity(device))


def claim(mine: Claim, store: Store, rank: int, world: int) -> None:
    """Compare the claims of all ranks; where they cannot run together, all raise `RunError`.

    Collective. Rank 0 reads all claims, since every rank would read as many as there are.
    """
    store.set(f"claim {rank}", json.dumps(asdict(mine)))
    if rank == 0:
        told = store.multi_get([f"claim {other}" for other in range(world)])
        store.set(_VERDICT, conflict([Claim(**json.loads(text)) for text in told]))
    verdict = store.get(_VERDICT).decode()
    if not verdict:
        return
    store.set(f"told {rank}", "")
    if rank == 0:
        # The store often ends with rank 0, so the others must have read the reason before.
        with contextlib.suppress(RuntimeError):
            store.wait([f"told {other}" for other in range(world)], PATIENCE)
    raise RunError(verdict)


def conflict(claims: Sequence[Claim]) -> str:
    """The reason why ranks with these claims cannot run, by rank; "" if there is none."""
    for rank, one in enumerate(claims):
        who = f"rank {rank} on {one.host}"
        if one.error:
            return f"{who} cannot take part: {one.error}"
        if one.backend != claims[0].backend:
            return (
                f"{who} uses the backend {one.backend}, and rank 0 on {claims[0].host} uses "
                f"{claims[0].backend}: does torch find the devices of both machines?"
            )
    users: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(claims):
        users[one.device].append(rank)
    shared = [(device, ranks) for device, ranks in users.items() if device and len(ranks) > 1]
    if not shared:
        return ""
    device, ranks = shared[0]
    names = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
    return (
        f"ranks {names} on {claims[ranks[0]].host} use the same device ({device}): start at most "
        "one rank a device, and give each its own: LOCAL_RANK, as torchrun sets it, or "
        "torch.cuda.set_device(...) before a process group of your own"
    )


def remember(device: torch.device) -> None:
    """Note the device with which the present process group was made."""
    _OWN.world = dist.group.WORLD
    _OWN.device = device


def device_of_group() -> torch.device:
    """This rank's device in collectives; the CPU where there is no process group.

    Collective in a process group that a program has made itself, the first time. Raises `RunError`
    if ranks share a device there.
    """
    if not dist.is_initialized():
        return torch.device("cpu")
    if _OWN.device is None or _OWN.world is not dist.group.WORLD:
        remember(_device_of_others())
    assert _OWN.device is not None
    return _OWN.device


def _device_of_others() -> torch.device:
    """The device in a process group that this package has not made."""
    name = dist.get_backend()
    kind = device_type(str(dist.get_backend_config()) if name == "undefined" else name)
    if kind == "cpu":
        return torch.device("cpu")
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        return torch.device(world.bound_device_id)
    device = torch.device(kind, torch.get_device_module(kind).current_device())
    # Through the store: a collective of ranks that share a device would fail or hang.
    store = PrefixStore("autopar devices", distributed_c10d._get_default_store())
    claim(Claim.of(name, device), store, dist.get_rank(), dist.get_world_size())
    return device


def _identity(device: torch.device) -> str:
    """A name of a device that no other device of any machine has."""
    properties = torch.get_device_module(device.type).get_device_properties(device)
    unique = getattr(properties, "uuid", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return str(unique or f"{device} of {visible or 'all'} on {socket.gethostname()}")
