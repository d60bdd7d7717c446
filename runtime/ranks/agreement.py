"""Agreement of the ranks: all compare plan and model before their first collective.

Ranks that differ would otherwise wait for one another for ever, or compute nonsense. Every rank
sends its digests in a message of fixed size, with its own error if it has one. After one all-gather
all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from autopar.errors import PlanError

from .collectives import begin_gather
from .contents import DIGEST
from .current_action import aside
from .process_groups import host_group

_C10D = torch.ops._c10d_functional

MESSAGE = 1024
"""Bytes of a rank's message: digests of 16 bytes, then text."""


def digest(*parts: bytes | str) -> bytes:
    """A short digest of data that must agree."""
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part.encode() if isinstance(part, str) else part)
    return checksum.digest()[:DIGEST]


def agree(
    facts: Mapping[str, bytes],
    *,
    failure: Exception | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Compare digests over all ranks; `facts` maps names to digests.

    If ranks differ, or one has failed (`failure`), all raise the same error. If all have failed,
    each raises its own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if failure is not None:
            raise failure
        return
    message = _message(facts, failure)
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    world = dist.group.WORLD
    assert world is not None
    with aside():
        # One message of fixed size: a rank that has failed must not leave the others waiting for
        # a second one whose length they do not know.
        coming = begin_gather(own, dist.get_world_size(), world.group_name)
        rows = _C10D.wait_tensor(coming).cpu().view(-1, MESSAGE)
    compare_messages([row.numpy().tobytes() for row in rows], list(facts), failure)


def _message(facts: Mapping[str, bytes], failure: Exception | None) -> bytes:
    """A rank's message: whether it has failed, its digests, and the text of its error."""
    text = b""
    if failure is not None:
        text = (str(failure) or type(failure).__name__).encode()
    start = bytes([failure is not None]) + b"".join(facts.values())
    return (start + text)[:MESSAGE].ljust(MESSAGE, b"\0")


def compare_messages(
    messages: Sequence[bytes], names: Sequence[str], failure: Exception | None
) -> None:
    """Raise an error if the messages of all ranks show a failure or a difference."""
    failed = [rank for rank, message in enumerate(messages) if message[0]]
    # Where every rank fails, each raises its own error, with its own trace.
    if failure is not None and len(failed) == len(messages):
        raise failure
    if failed:
        text = messages[failed[0]][1 + DIGEST * len(names) :].rstrip(b"\0").decode(errors="replace")
        raise PlanError(f"rank {failed[0]} cannot take part: {text}") from failure
    for number, name in enumerate(names):
        at = 1 + DIGEST * number
        digests = [message[at : at + DIGEST] for message in messages]
        others = [rank for rank, own in enumerate(digests) if own != digests[0]]
        if others:
            ranks = ", ".join(map(str, others[:8]))
            if len(others) > 8:
                ranks += f" and {len(others) - 8} more"
            raise PlanError(
                f"the ranks do not agree: {name} of rank {ranks} is another than that of rank 0; "
                "give every rank the same"
            )


def first_rank_says(number: int, *, device: torch.device | str = "cpu") -> int:
    """The number that rank 0 has, on every rank; `device`: where the ranks compute."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    value = torch.tensor([number], dtype=torch.int64)
    dist.broadcast(value, src=0, group=host_group(device))
    return int(value)
