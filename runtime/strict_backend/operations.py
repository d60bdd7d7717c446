"""The operations of torch.distributed, described for a queue and run on Gloo.

Each row takes the tensors of a call and gives an `Operation`. Inputs are read when the operation
runs, not when it is issued. Tensors that get a result hold garbage until it has been waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import CONTROL, Gloo, Operation, Results

DATA = CONTROL + 1
"""The tag of the first message to a rank."""


def on_wire(value: Tensor) -> Tensor:
    """The elements of a tensor in a type that Gloo carries; a view."""
    value = value.data
    if value.is_complex():
        return torch.view_as_real(value)
    # Gloo knows neither bool in all collectives nor types of eight bits.
    if value.dtype is torch.bool or value.dtype.itemsize == 1:
        return value.view(torch.uint8)
    return value


def spoil(value: Tensor) -> None:
    """Fill a tensor with garbage, which tells on those who read it too early."""
    if value.is_floating_point() or value.is_complex():
        value.data.fill_(torch.nan)
    elif value.dtype is not torch.bool:
        value.data.fill_(torch.iinfo(value.dtype).max)


def _begun(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Spoil the outputs; the inputs, those in the memory of an output as they were before.

    An operation may work in place: a rank's shard is a part of what it gathers.
    """
    memory = {output.untyped_storage().data_ptr() for output in outputs}
    unspoiled = [
        value.detach().clone() if value.untyped_storage().data_ptr() in memory else value
        for value in inputs
    ]
    for output in outputs:
        spoil(output)
    return unspoiled


def described(value: Tensor) -> str:
    """The number of elements and their type."""
    return f"{value.numel()} {str(value.dtype).removeprefix('torch.')}"


def _all(values: Sequence[Tensor]) -> str:
    return ", ".join(map(described, values))


def _summed(gloo: Gloo, value: Tensor, reduction: Any) -> Tensor:
    """The reduction of a tensor, which is overwritten."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(reduction)
    flat = torch.view_as_real(value) if value.is_complex() else value
    gloo.allreduce([flat], options).wait()
    return value


def _gathered(gloo: Gloo, value: Tensor) -> Tensor:
    """The tensors of all ranks, one behind the other: [ranks, elements]."""
    flat = on_wire(value.contiguous()).reshape(-1)
    rows = flat.new_empty(gloo.size(), flat.numel())
    if flat.numel():
        gloo._allgather_base(rows, flat.view(1, -1)).wait()
    return rows


def _like(row: Tensor, target: Tensor) -> Tensor:
    """A row of elements on the wire in the shape and type of a tensor."""
    if target.is_complex():
        return torch.view_as_complex(row.view(*target.shape, 2))
    return row.view(target.dtype).view(target.shape)


def all_reduce(values: Sequence[Tensor], reduction: Any) -> Operation:
    """Reduce tensors in place."""
    # In place: input and result share their memory, which NCCL may change from now on.
    copies = [value.detach().clone() for value in values]
    for value in values:
        spoil(value)

    def run(gloo: Gloo) -> Results:
        return [(v, _summed(gloo, c, reduction)) for v, c in zip(values, copies, strict=True)]

    return Operation(
        kind=f"all_reduce ({reduction.name.lower()})", facts=f"of {_all(values)}", run=run
    )


def all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Operation:
    """Gather each input into its list of outputs, one for every rank."""
    inputs = _begun([output for row in outputs for output in row], inputs)

    def run(gloo: Gloo) -> Results:
        results = []
        for row, value in zip(outputs, inputs, strict=True):
            gathered = _gathered(gloo, value)
            results += [(out, _like(one, out)) for out, one in zip(row, gathered, strict=True)]
        return results

    return Operation(kind="all_gather", facts=f"of {_all(inputs)} a rank", run=run)


def reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], reduction: Any
) -> Operation:
    """Reduce each list of inputs, of which every rank gets one."""
    before = iter(_begun(outputs, [value for row in inputs for value in row]))
    inputs = [list(itertools.islice(before, len(row))) for row in inputs]

    def run(gloo: Gloo) -> Results:
        results = []
        for out, row in zip(outputs, inputs, strict=True):
            # Gloo sends a whole all-reduce for this anyhow.
            whole = torch.cat([value.detach().reshape(-1) for value in row])
            part = _summed(gloo, whole, reduction).chunk(gloo.size())[gloo.rank()]
            results.append((out, part.view(out.shape)))
        return results

    facts = f"to {_all(outputs)} a rank"
    return Operation(kind=f"reduce_scatter ({reduction.name.lower()})", facts=facts, run=run)


def all_to_all(
    output: Tensor, value: Tensor, incoming: Sequence[int], outgoing: Sequence[int], size: int
) -> Operation:
    """Send rows of a tensor to all ranks: as many to (from) each as the lists say, else equally."""
    spoil(output)
    counts = {
        name: [rows * (one.numel() // max(one.shape[0], 1)) for rows in given]
        if given
        else [one.numel() // size] * size
        for name, given, one in (("to", outgoing, value), ("from", incoming, output))
    }

    def run(gloo: Gloo) -> Results:
        result = torch.empty_like(output)
        gloo.alltoall_base(
            on_wire(result), on_wire(value), list(incoming), list(outgoing), dist.AllToAllOptions()
        ).wait()
        return [(output, result)]

    return Operation(
        kind="all_to_all",
        facts=f"of {str(value.dtype).removeprefix('torch.')}",
        run=run,
        outgoing=tuple(map(str, counts["to"])),
        incoming=tuple(map(str, counts["from"])),
    )


def broadcast(values: Sequence[Tensor], root: int, *, sends: bool) -> Operation:
    """Give every rank the tensors of one; `sends`: whether that is this rank."""
    if not sends:
        for value in values:
            spoil(value)

    def run(gloo: Gloo) -> Results:
        results = []
        for value in values:
            copy = on_wire(value).clone()
            options = dist.BroadcastOptions()
            options.rootRank = root
            options.rootTensor = 0
            gloo.broadcast([copy], options).wait()
            results.append((value, _like(copy, value)))
        return results

    return Operation(kind="broadcast", facts=f"of {_all(values)} from place {root}", run=run)


def reduce(values: Sequence[Tensor], root: int, reduction: Any) -> Operation:
    """Reduce tensors to one rank."""
    copies = [value.detach().clone() for value in values]

    def run(gloo: Gloo) -> Results:
        sums = [_summed(gloo, copy, reduction) for copy in copies]
        return list(zip(values, sums, strict=True)) if gloo.rank() == root else []

    facts = f"of {_all(values)} to place {root}"
    return Operation(kind=f"reduce ({reduction.name.lower()})", facts=facts, run=run)


def gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], root: int) -> Operation:
    """Gather a tensor on one rank."""
    inputs = _begun([output for row in outputs for output in row], inputs)

    def run(gloo: Gloo) -> Results:
        rows = _gathered(gloo, inputs[0])
        if gloo.rank() != root:
            return []
        return [(out, _like(row, out)) for out, row in zip(outputs[0], rows, strict=True)]

    return Operation(kind="gather", facts=f"of {_all(inputs)} to place {root}", run=run)


def scatter(outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], root: int) -> Operation:
    """Give every rank one of the tensors of one rank."""
    output = outputs[0]
    spoil(output)

    def run(gloo: Gloo) -> Results:
        flat = on_wire(output).reshape(-1)
        whole = flat.new_empty(gloo.size(), flat.numel())
        if gloo.rank() == root:
            whole.copy_(torch.stack([on_wire(value).reshape(-1) for value in inputs[0]]))
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        gloo.broadcast([whole], options).wait()
        return [(output, _like(whole[gloo.rank()], output))]

    return Operation(kind="scatter", facts=f"of {described(output)} from place {root}", run=run)


def barrier(limit: timedelta | None = None) -> Operation:
    """Wait until all ranks are here, for the limit or for that of the group."""
    return Operation(kind="barrier", facts="", run=lambda gloo: [], limit=limit)


def split(members: Sequence[int]) -> Operation:
    """Make a group out of a bound one: a collective of the latter, also of ranks outside."""
    return Operation(kind="split", facts="", run=lambda gloo: [], members=tuple(members))


Message = tuple[bool, int, Tensor]
"""Whether it is sent, the other rank's place in the group, and the tensor."""


def messages(batch: Sequence[Message], ranks: Sequence[int]) -> Operation:
    """Messages that start together: one, or the batch of `dist.batch_isend_irecv`."""
    for sends, _, value in batch:
        if not sends:
            spoil(value)
    peers = dict.fromkeys(peer for _, peer, _ in batch)
    by_peer = {
        peer: (
            tuple(described(v) for sends, to, v in batch if sends and to == peer),
            tuple(described(v) for sends, to, v in batch if not sends and to == peer),
        )
        for peer in peers
    }

    def run(gloo: Gloo) -> Results:
        results = []
        works = []
        tags: dict[tuple[bool, int], int] = {}
        for sends, peer, value in batch:
            # Messages of a pair may overtake each other on Gloo, so each has a tag of its own.
            tag = tags.setdefault((sends, peer), DATA)
            tags[sends, peer] += 1
            copy = value if sends else torch.empty_like(value)
            flat = on_wire(copy).view(-1)
            begin = gloo.send if sends else gloo.recv
            works.append((begin([flat], peer, tag), flat))
            if not sends:
                results.append((value, copy))
        for work, _ in works:
            work.wait()
        return results

    one = [
        f"{'send' if sends else 'receive'} of {described(value)} "
        f"{'to' if sends else 'from'} rank {ranks[peer]}"
        for sends, peer, value in batch
    ]
    kind = one[0] if len(batch) == 1 else f"batch ({', '.join(one)})"
    return Operation(kind=kind, facts="", run=run, messages=by_peer)
