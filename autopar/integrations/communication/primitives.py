"""The primitives of collective communication, over torch.distributed.

A primitive never changes its argument; it returns a new tensor.

    primitive        result on rank i, where rank j holds x_j
    broadcast        x_root
    reduce           op(x_0 .. x_{n-1}) on the root, None elsewhere
    all_reduce       op(x_0 .. x_{n-1})
    gather           x_0 .. x_{n-1} joined along dim 0 on the root, None elsewhere
    all_gather       x_0 .. x_{n-1} joined along dim 0
    scatter          part i of n equal ones of x_root along dim 0
    reduce_scatter   part i of op(x_0 .. x_{n-1})
    all_to_all       part i of x_0, ..., part i of x_{n-1}, joined along dim 0

`all_reduce` and `all_gather` also take several tensors and return a list. Tensors of one type
travel as one message, like collectives with one fusion number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from autopar.errors import UsageError, unknown

from .ranks import Group, member, process_group, ranks_of, require_init

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

REDUCTIONS = ("sum", "min", "max", "product")


def _operation(name: str, value: Tensor) -> Any:
    import torch.distributed as dist

    from autopar.runtime.ranks.collectives import MOVABLE

    if name not in REDUCTIONS:
        raise UsageError(unknown("reduction", name, REDUCTIONS))
    if value.dtype not in MOVABLE:
        raise UsageError(
            f"no backend adds up {value.dtype}: cast it to one of "
            f"{', '.join(sorted(map(str, MOVABLE)))}"
        )
    return {
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "product": dist.ReduceOp.PRODUCT,
    }[name]


def _own(value: Tensor) -> Tensor:
    """A copy that a collective may write: in one piece, without autograd."""
    import torch

    return value.detach().clone(memory_format=torch.contiguous_format)


def _moved(value: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a primitive that only moves rows; types that backends cannot carry travel as bytes."""
    import torch

    from autopar.runtime.ranks.collectives import MOVABLE

    own = value.detach().contiguous()
    rows = own if own.dim() else own.view(1)
    if rows.dtype in MOVABLE:
        return move(rows)
    out = move(rows.reshape(rows.shape[0], -1).view(torch.uint8))
    return out.view(rows.dtype).view(out.shape[0], *rows.shape[1:])


def _parts(value: Tensor, group: Group) -> int:
    """The number of ranks, into which dim 0 must divide."""
    count = len(ranks_of(group))
    if not value.dim() or value.shape[0] % count:
        raise UsageError(
            f"dim 0 of a tensor of shape {list(value.shape)} does not divide into {count} equal "
            "parts; pad it"
        )
    return count


def broadcast(value: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The root's tensor on every rank; the others' must have its shape and type.

    `root` counts among all ranks.
    """
    import torch.distributed as dist

    def move(own: Tensor) -> Tensor:
        out = own.clone()
        dist.broadcast(out, src=root, group=process_group(group))
        return out

    return _moved(value, move).view(value.shape)


def reduce(value: Tensor, root: int = 0, op: str = "sum", group: Group = None) -> Tensor | None:
    """The reduction over the group on the root, None elsewhere."""
    import torch.distributed as dist

    out = _own(value)
    dist.reduce(out, dst=root, op=_operation(op, out), group=process_group(group))
    return out if dist.get_rank() == root else None


@overload
def all_reduce(value: Tensor, op: str = "sum", group: Group = None) -> Tensor: ...
@overload
def all_reduce(value: Sequence[Tensor], op: str = "sum", group: Group = None) -> list[Tensor]: ...
def all_reduce(
    value: Tensor | Sequence[Tensor], op: str = "sum", group: Group = None
) -> Tensor | list[Tensor]:
    """The reduction over the group, on every rank.

    Several tensors travel in one message for each type.
    """
    import torch
    import torch.distributed as dist

    if not isinstance(value, torch.Tensor):
        return _together(value, lambda flat: all_reduce(flat, op, group).view(1, -1), joined=False)
    out = _own(value)
    dist.all_reduce(out, op=_operation(op, out), group=process_group(group))
    return out


def _together(
    values: Sequence[Tensor], move: Callable[[Tensor], Tensor], *, joined: bool
) -> list[Tensor]:
    """Run a primitive once for all tensors of a type.

    `move` returns rows, `joined` along dim 0, or a single row.
    """
    import torch

    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [place for place, value in enumerate(values) if value.dtype == dtype]
        rows = move(torch.cat([values[place].detach().reshape(-1) for place in places]))
        for place, part in zip(
            places,
            torch.split(rows, [values[place].numel() for place in places], dim=1),
            strict=True,
        ):
            shape = values[place].shape
            results[place] = (
                part.reshape(len(rows) * (shape[0] if shape else 1), *shape[1:])
                if joined
                else part.reshape(shape)
            )
    return [results[place] for place in range(len(values))]


def gather(value: Tensor, root: int = 0, group: Group = None) -> Tensor | None:
    """All ranks' tensors, joined along dim 0, on the root; None elsewhere."""
    import torch
    import torch.distributed as dist

    here = dist.is_initialized() and member(group) == root

    def move(own: Tensor) -> Tensor:
        pieces = [torch.empty_like(own) for _ in ranks_of(group)] if here else None
        dist.gather(own, pieces, dst=root, group=process_group(group))
        return torch.cat(pieces) if pieces else own

    parts = _moved(value, move)
    return parts if here else None


@overload
def all_gather(value: Tensor, group: Group = None) -> Tensor: ...
@overload
def all_gather(value: Sequence[Tensor], group: Group = None) -> list[Tensor]: ...
def all_gather(value: Tensor | Sequence[Tensor], group: Group = None) -> Tensor | list[Tensor]:
    """All ranks' tensors, joined along dim 0, on every rank.

    Several tensors travel in one message for each type.
    """
    import torch

    from autopar.runtime.torch_versions import all_gather_single

    if not isinstance(value, torch.Tensor):
        return _together(value, lambda flat: all_gather(flat.view(1, -1), group), joined=True)

    def move(own: Tensor) -> Tensor:
        out = own.new_empty(own.shape[0] * len(ranks_of(group)), *own.shape[1:])
        all_gather_single(out, own, group=process_group(group))
        return out

    return _moved(value, move)


def scatter(value: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """This rank's part of the root's tensor, cut along dim 0.

    The others' must have its shape and type.
    """
    import torch.distributed as dist

    count = _parts(value, group)

    def move(own: Tensor) -> Tensor:
        pieces = (
            [piece.contiguous() for piece in own.chunk(count)] if dist.get_rank() == root else None
        )
        out = own.new_empty(own.shape[0] // count, *own.shape[1:])
        dist.scatter(out, pieces, src=root, group=process_group(group))
        return out

    return _moved(value, move)


def reduce_scatter(value: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """This rank's part, along dim 0, of the reduction over the group."""
    from autopar.runtime.torch_versions import reduce_scatter_single

    count = _parts(value, group)
    own = value.detach().contiguous()
    out = own.new_empty(own.shape[0] // count, *own.shape[1:])
    reduce_scatter_single(out, own, op=_operation(op, own), group=process_group(group))
    return out


def all_to_all(value: Tensor, group: Group = None) -> Tensor:
    """Send part j along dim 0 to rank j.

    Join the received parts along dim 0 in the order of the ranks.
    """
    import torch
    import torch.distributed as dist

    _parts(value, group)

    def move(own: Tensor) -> Tensor:
        out = torch.empty_like(own)
        dist.all_to_all_single(out, own, group=process_group(group))
        return out

    return _moved(value, move)


def _pair(source: int, target: int) -> ProcessGroup:
    """The group for messages from one rank to another, of which this is one."""
    import torch.distributed as dist

    from autopar.runtime.ranks.process_groups import message_group

    other = target if source == dist.get_rank() else source
    if other == dist.get_rank() or not 0 <= other < dist.get_world_size():
        raise UsageError(f"rank {other} is no other rank of the {dist.get_world_size()}")
    return message_group(source, target)


def send(value: Tensor, to: int) -> None:
    """Hand a tensor to rank `to`, which calls `recv`.

    It waits until the tensor is taken; on GPUs not the program waits, but what it issues next.
    """
    import torch.distributed as dist

    require_init()

    def move(own: Tensor) -> Tensor:
        dist.send(own, dst=to, group=_pair(dist.get_rank(), to))
        return own

    _moved(value, move)


def recv(like: Tensor, source: int) -> Tensor:
    """The tensor that rank `source` sends, of the shape and type of `like`."""
    import torch
    import torch.distributed as dist

    require_init()

    def move(own: Tensor) -> Tensor:
        out = torch.empty_like(own)
        dist.recv(out, src=source, group=_pair(source, dist.get_rank()))
        return out

    return _moved(like, move).view(like.shape)


def barrier(group: Group = None) -> None:
    """Wait until all ranks of the group are here."""
    import torch.distributed as dist

    dist.barrier(group=process_group(group))
