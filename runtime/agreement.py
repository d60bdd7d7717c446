"""Agreement: before a model's first collective all ranks compare plan and model, and fail together if they differ.

Every rank sends its digests in a message of fixed size, with its own error if it has one. After one all-gather all
ranks raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError

from .current_action import aside

_C10D = torch.ops._c10d_functional

MESSAGE = 1024
"""Bytes of a rank's message: digests of 16 bytes, then text."""
DIGEST = 16


def digest(*parts: bytes | str) -> bytes:
    """A short digest of data that must agree."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.digest()[:DIGEST]


def update_digest(found: hashlib._Hash, value: Tensor) -> None:
    """Take a tensor into a digest: its shape, its type and all of its bits."""
    plain = value.detach()
    found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
    if plain.numel() and type(plain) in (Tensor, torch.nn.Parameter):  # pretended tensors have no contents
        found.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def checksum(values: Iterable[Tensor]) -> bytes:
    """A digest of the contents of tensors, in their order."""
    found = hashlib.sha256()
    for value in values:
        update_digest(found, value)
    return found.digest()[:DIGEST]


def agree(facts: Mapping[str, bytes], *, failure: Exception | None = None, device: torch.device | str = "cpu") -> None:
    """Compare digests over all ranks; `facts` maps names to digests.

    If ranks differ, or one has failed (`failure`), all raise the same error. If all have failed, each raises its own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if failure is not None:
            raise failure
        return
    text = b"" if failure is None else (str(failure) or type(failure).__name__).encode()[: MESSAGE - 1 - DIGEST * len(facts)]
    message = bytes([failure is not None]) + b"".join(facts.values()) + text
    own = torch.frombuffer(bytearray(message.ljust(MESSAGE, b"\0")), dtype=torch.uint8).to(device)
    world = dist.group.WORLD
    assert world is not None
    with aside():
        everyone = _C10D.wait_tensor(_C10D.all_gather_into_tensor(own, dist.get_world_size(), world.group_name))
    _compare([row.numpy().tobytes() for row in everyone.cpu().view(-1, MESSAGE)], list(facts), failure)


def _compare(messages: Sequence[bytes], names: Sequence[str], failure: Exception | None) -> None:
    failed = [rank for rank, message in enumerate(messages) if message[0]]
    if failure is not None and len(failed) == len(messages):
        raise failure
    if failed:
        text = messages[failed[0]][1 + DIGEST * len(names) :].rstrip(b"\0").decode(errors="replace")
        raise PlanError(f"rank {failed[0]} cannot take part: {text}") from failure
    for number, name in enumerate(names):
        at = 1 + DIGEST * number
        found = [message[at : at + DIGEST] for message in messages]
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        if others:
            ranks = ", ".join(map(str, others[:8])) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
            raise PlanError(f"the ranks do not agree: {name} of rank {ranks} is another than that of rank 0; give every rank the same")


def first_rank_says(number: int, *, device: torch.device | str = "cpu") -> int:
    """The number that rank 0 has, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    value = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(value, src=0)
    return int(value)
