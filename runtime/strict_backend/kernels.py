"""Kernels of the operators `c10d::...`, which put every call on a strict group into its queue.

torch's functional collectives, its object collectives and DTensors come to these operators, so
nothing goes past them. Groups of another backend run as before, but at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from . import operations
from .communicator import Communicator, Operation
from .progress import RuleBroken

NCCL_TYPES = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
    }
)
"""The types that torch hands to NCCL; complex and bool travel as numbers of other types."""

COMMUNICATORS: dict[str, Communicator] = {}
"""The queues of this rank, by the names of their groups."""
BATCHES: dict[str, list[operations.Message]] = {}
"""Messages of open batches, by the names of their groups."""

Group = Any
"""A process group as an operator gets it."""


def _issue(group: Group, operation: Operation) -> Any:
    """Put an operation into the queue of its group; the handle as operators return it."""
    own = dist.ProcessGroup.unbox(group)
    communicator = COMMUNICATORS.get(own.group_name)
    if communicator is not None:
        return communicator.issue(operation).boxed()
    # A group of real Gloo, such as one for checkpoints, has no queue here.
    for target, value in operation.run(own._get_backend(torch.device("cpu"))):
        target.data.copy_(value)
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    library: Any = _distributed_c10d
    return library._create_work_from_future(future).boxed()


def _check(group: Group, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that NCCL cannot carry."""
    name = dist.ProcessGroup.unbox(group).group_name
    if name not in COMMUNICATORS:
        return
    communicator = COMMUNICATORS[name]
    where = f"rank {communicator.progress.rank}, group {communicator.ranks}"
    for value in tensors:
        if value.device.type != "cpu":
            raise RuleBroken(f"{where}: a tensor on {value.device}, but the group is on the cpu")
        if value.dtype not in NCCL_TYPES:
            raise RuleBroken(f"{where}: NCCL has no {value.dtype}; send the bytes")
        if not value.is_contiguous():
            raise RuleBroken(f"{where}: a tensor with strides {value.stride()} is in pieces")


def _size(group: Group) -> int:
    return int(dist.ProcessGroup.unbox(group).size())


def _place(group: Group) -> int:
    return int(dist.ProcessGroup.unbox(group).rank())


def _all_reduce(tensors: list[Tensor], group: Group, reduction: Any, *_: Any) -> Any:
    _check(group, tensors)
    return tensors, _issue(group, operations.all_reduce(tensors, _op(reduction)))


def _all_reduce_coalesced(tensors: list[Tensor], group: Group, reduction: Any, *_: Any) -> Any:
    return _all_reduce(tensors, group, reduction)[1]


def _all_gather(outputs: list[list[Tensor]], inputs: list[Tensor], group: Group, *_: Any) -> Any:
    _check(group, [*inputs, *(value for row in outputs for value in row)])
    return outputs, _issue(group, operations.all_gather(outputs, inputs))


def _all_gather_base(output: Tensor, value: Tensor, group: Group, *_: Any) -> Any:
    return output, _all_gather_coalesced([output], [value], group)


def _all_gather_coalesced(
    outputs: list[Tensor], inputs: list[Tensor], group: Group, *_: Any
) -> Any:
    _check(group, [*inputs, *outputs])
    rows = [list(output.view(-1).chunk(_size(group))) for output in outputs]
    return _issue(group, operations.all_gather(rows, [value.view(-1) for value in inputs]))


def _reduce_scatter(
    outputs: list[Tensor], inputs: list[list[Tensor]], group: Group, reduction: Any, *_: Any
) -> Any:
    _check(group, [*outputs, *(value for row in inputs for value in row)])
    return outputs, _issue(group, operations.reduce_scatter(outputs, inputs, _op(reduction)))


def _reduce_scatter_base(
    output: Tensor, value: Tensor, group: Group, reduction: Any, *_: Any
) -> Any:
    return output, _reduce_scatter_coalesced([output], [value], group, reduction)


def _reduce_scatter_coalesced(
    outputs: list[Tensor], inputs: list[Tensor], group: Group, reduction: Any, *_: Any
) -> Any:
    return _reduce_scatter(outputs, [[value] for value in inputs], group, reduction)[1]


def _all_to_all(
    output: Tensor, value: Tensor, group: Group, incoming: list[int], outgoing: list[int], *_: Any
) -> Any:
    _check(group, [output, value])
    sizes = incoming, outgoing, _size(group)
    return _issue(group, operations.all_to_all(output, value, *sizes))


def _broadcast(tensors: list[Tensor], group: Group, root: int, *_: Any) -> Any:
    _check(group, tensors)
    sends = _place(group) == root
    return tensors, _issue(group, operations.broadcast(tensors, root, sends=sends))


def _reduce(tensors: list[Tensor], group: Group, reduction: Any, root: int, *_: Any) -> Any:
    _check(group, tensors)
    return _issue(group, operations.reduce(tensors, root, _op(reduction)))


def _gather(
    outputs: list[list[Tensor]], inputs: list[Tensor], group: Group, root: int, *_: Any
) -> Any:
    _check(group, [*inputs, *(value for row in outputs for value in row)])
    return _issue(group, operations.gather(outputs, inputs, root))


def _scatter(
    outputs: list[Tensor], inputs: list[list[Tensor]], group: Group, root: int, *_: Any
) -> Any:
    _check(group, [*outputs, *(value for row in inputs for value in row)])
    return outputs, _issue(group, operations.scatter(outputs, inputs, root))


def _barrier(
    tensor: Tensor, group: Group, devices: Any, later: bool = True, milliseconds: int = -1
) -> Any:
    # A negative limit is that of the group.
    limit = timedelta(milliseconds=milliseconds) if milliseconds >= 0 else None
    return _issue(group, operations.barrier(limit))


def _send(tensors: list[Tensor], group: Group, peer: int, tag: int) -> Any:
    return _message(group, (True, peer, tensors[0]))


def _receive(tensors: list[Tensor], group: Group, peer: int, tag: int) -> Any:
    return _message(group, (False, peer, tensors[0]))


def _message(group: Group, message: operations.Message) -> Any:
    _check(group, [message[2]])
    own = dist.ProcessGroup.unbox(group)
    if own.group_name in BATCHES:
        BATCHES[own.group_name].append(message)
        # The handle of the batch stands for those of its messages.
        return dist.Work().boxed()
    ranks = dist.get_process_group_ranks(own)
    return _issue(group, operations.messages([message], ranks))


def _op(reduction: Any) -> Any:
    return dist.ReduceOp.RedOpType(reduction.op())


KERNELS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_base,
    "allgather_into_tensor_coalesced_": _all_gather_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "alltoall_base_": _all_to_all,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "gather_": _gather,
    "scatter_": _scatter,
    "barrier": _barrier,
    "send": _send,
    "recv_": _receive,
}
