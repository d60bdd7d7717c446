"""Programs of ranks that break one rule of NCCL each, and programs that break none."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from autopar.order.actions import Action, Word
from autopar.runtime.ranks.current_action import at
from autopar.runtime.ranks.process_groups import group_of

C10D = torch.ops._c10d_functional


def _world() -> str:
    return str(dist.group.WORLD.group_name)


def other_kind() -> None:
    """A sum on one rank, a gather on the others, behind a broadcast that agrees."""
    rank = dist.get_rank()
    dist.broadcast(torch.zeros(2), 0)
    action = Action(word=Word.FORWARD, chunk=0, micro_batch=1)
    with at(action):
        if rank == 1:
            C10D.wait_tensor(C10D.all_reduce(torch.ones(3), "sum", _world()))
        else:
            C10D.wait_tensor(C10D.all_gather_into_tensor(torch.ones(3), 3, _world()))


def other_size() -> None:
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 2)))


def other_type() -> None:
    dtype = torch.float64 if dist.get_rank() == 2 else torch.float32
    dist.all_reduce(torch.ones(3, dtype=dtype))


def other_reduction() -> None:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def other_root() -> None:
    dist.broadcast(torch.ones(3), dist.get_rank())


def other_order() -> None:
    """Two sums of unlike sizes in two orders."""
    sizes = (4, 2) if dist.get_rank() == 1 else (2, 4)
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in sizes]
    for work in works:
        work.wait()


def other_parts() -> None:
    """An all-to-all in which rank 1 expects more of rank 0 than that sends."""
    rank = dist.get_rank()
    incoming = [2, 1, 1] if rank == 1 else [1, 1, 1]
    out = torch.empty(sum(incoming))
    dist.all_to_all_single(out, torch.ones(3), incoming, [1, 1, 1])


def missing_rank() -> None:
    """Rank 2 does not take part, and goes on to the end of its program."""
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(3))


def crossed_groups() -> None:
    """Two groups of the same ranks, used in two orders."""
    first = dist.new_group([0, 1, 2])
    second = dist.new_group([0, 1, 2])
    groups = (first, second) if dist.get_rank() else (second, first)
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)


def members_alone() -> None:
    """A group made by its members, although the world is bound to a device."""
    if dist.get_rank() != 1:
        dist.new_group([0, 2], use_local_synchronization=True)


def unlike_groups() -> None:
    """Ranks 0 and 1 make unlike groups in one split."""
    members = [0, 1] if dist.get_rank() == 0 else [1, 2]
    dist.new_group(members, use_local_synchronization=True)


def made_in_a_circle() -> None:
    """Each rank makes another group first, and waits there for the next rank."""
    rank = dist.get_rank()
    group_of(sorted((rank, (rank + 1) % 3)))


def both_send() -> None:
    """Two ranks send to each other, and then receive."""
    rank = dist.get_rank()
    if rank < 2:
        work = dist.isend(torch.ones(2), 1 - rank)
        dist.recv(torch.empty(2), 1 - rank)
        work.wait()


def sends_in_a_circle() -> None:
    """Every rank sends to the next one before it receives."""
    rank = dist.get_rank()
    work = dist.isend(torch.ones(2), (rank + 1) % 3)
    dist.recv(torch.empty(2), (rank - 1) % 3)
    work.wait()


def message_size() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        dist.recv(torch.empty(3), 0)


def message_and_collective() -> None:
    """Rank 0 sends before a sum, rank 1 receives behind it."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(2), 1)
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        dist.recv(torch.empty(2), 0)


def lacking_type() -> None:
    dist.broadcast(torch.ones(2, dtype=torch.int16), 0)


def other_device() -> None:
    dist.all_reduce(torch.empty(2, device="meta"))


def in_pieces() -> None:
    dist.all_reduce(torch.ones(4, 4).t()[1:])


# --- nothing broken ---


def batched() -> list[float]:
    """Every rank sends to the next one and receives from the one before, in a batch."""
    rank = dist.get_rank()
    got = torch.empty(2)
    batch = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % 3),
        dist.P2POp(dist.irecv, got, (rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    values: list[float] = got.tolist()
    return values


def late() -> tuple[bool, float]:
    """A buffer is garbage until the result has been waited for, however long that is."""
    value = torch.ones(3)
    work = dist.all_reduce(value, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    early = bool(value.isnan().all())
    work.wait()
    return early, float(value.sum())


def coalesced() -> list[float]:
    """Coalesced collectives of torch."""
    size = dist.get_world_size()
    values = [torch.ones(2), torch.ones(3)]
    sums = C10D.all_reduce_coalesced(values, "sum", _world())
    rows = C10D.all_gather_into_tensor_coalesced(values, size, _world())
    whole = [torch.ones(size), torch.ones(2 * size)]
    parts = C10D.reduce_scatter_tensor_coalesced(whole, "sum", size, _world())
    return [float(C10D.wait_tensor(value).sum()) for value in (*sums, *rows, *parts)]


def in_place() -> list[float]:
    """Collectives whose input is a part of the output, and the other way round."""
    rank = dist.get_rank()
    rows = torch.full((3,), float(rank))
    dist.all_gather_into_tensor(rows, rows[rank : rank + 1])
    whole = torch.arange(3.0)
    dist.reduce_scatter_tensor(whole[rank : rank + 1], whole)
    return [*rows.tolist(), float(whole[rank]) / 3]


def objects() -> list[object]:
    """Object collectives, numbers in all forms, and groups made by all ranks."""
    rank = dist.get_rank()
    texts: list[object] = [None] * 3
    dist.all_gather_object(texts, f"rank {rank}")
    told = [rank]
    dist.broadcast_object_list(told, src=2)
    pair = dist.new_group([0, 2])
    value = torch.full((1,), 1j * rank)
    if rank != 1:
        dist.broadcast(value, 2, group=pair)
    flag = torch.tensor([rank == 1])
    dist.broadcast(flag, 1)
    mine = torch.empty(1)
    dist.scatter(mine, [torch.full((1,), float(i)) for i in range(3)] if rank == 0 else None, 0)
    rows = [torch.empty(1) for _ in range(3)]
    dist.gather(mine, rows if rank == 1 else None, 1)
    dist.barrier()
    return [texts, told, complex(value[0]), bool(flag), [float(row) for row in rows][rank:]]
