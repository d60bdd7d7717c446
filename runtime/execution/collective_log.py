"""A log of the actions and collectives of a rank, compared with its order and its prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.order.actions import Action, Word
from autopar.order.execution import Chunk, Execution
from autopar.order.messages import issued_by
from autopar.order.ranks import rank_order, update_order
from autopar.order.scheduled import Scheduled, scheduled
from autopar.runtime.ranks.current_action import present
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Program

Priced = Program | Scheduled | Execution
"""Sources of priced collectives: a program by itself, a program under a schedule, or a whole step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One collective of an action, as measured or as priced.

    `nbytes`: by the convention of its kind. `rows`: the number of rows that travel depends on
    data. Their price is that of all rows, or a mean; then `most` is what data may ask for.
    """

    kind: str
    ranks: tuple[int, ...]
    nbytes: int
    rows: bool = False
    most: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.nbytes} B among ranks {', '.join(map(str, self.ranks))}"


_KINDS = {
    "all_reduce": "all_reduce",
    # Flat messages of gradients are summed in place.
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class CollectiveLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the actions inside it with their collectives and messages.

    Each is measured by its tensors:

        with CollectiveLog() as log:
            module.loss(*inputs).backward()
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.actions: list[Action] = []
        self.issued: list[tuple[Action | None, Issued]] = []
        self.batch: list[Issued] = []
        """Gathers before a step, where ranks get parts of a batch."""

    def __enter__(self) -> CollectiveLog:
        super().__enter__()  # type: ignore[no-untyped-call]
        present().log = self.actions
        return self

    def __exit__(self, *error: object) -> None:
        present().log = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        # Messages in which ranks agree on something have no price.
        if present().aside:
            return out
        if namespace == "_c10d_functional" and name in _KINDS:
            self._note(_KINDS[name], self.members(args[-1]), args[0], out)
        # A message is priced where it is sent, so receives are not noted.
        elif namespace == "c10d" and name == "send":
            other = dist.get_global_rank(_group(args[1]), args[2])
            ranks = (dist.get_rank(), other)
            message = Issued(kind="send", ranks=ranks, nbytes=_bytes(args[0][0]))
            self.issued.append((present().action, message))
        return out

    def members(self, name: Any) -> tuple[int, ...]:
        """The ranks of a group."""
        return tuple(dist.get_process_group_ranks(_resolve_process_group(name)))

    def _note(
        self, kind: str, ranks: tuple[int, ...], value: torch.Tensor, out: torch.Tensor
    ) -> None:
        # The cost model counts the whole value: the result of a gather, the operand of the others.
        size = _bytes(out) if kind == "all_gather" else _bytes(value)
        state = present()
        if state.exchange == "send":
            kind = "send"
        rows = state.exchange == "rows"
        if rows:
            # Of sent and received rows, the side that is this rank's own.
            size = min(_bytes(value), _bytes(out))
        if state.exchange == "batch":
            self.batch.append(Issued(kind=kind, ranks=ranks, nbytes=size))
            return
        self.issued.append((state.action, Issued(kind=kind, ranks=ranks, nbytes=size, rows=rows)))

    def mismatch(self, program: Priced, rank: int, *, train: bool | None = None) -> str:
        """Differences of the log from the order and its prices, in words; empty if there are none.

        All actions must come in order. The collectives of one action must be the priced ones, in
        any sequence.
        """
        execution = execution_of(program)
        stage = stage_of(execution, rank)
        if train is None:
            train = any(action.word in ("B", "I") for action in self.actions)
        order: tuple[Action, ...] = ()
        if stage is not None:
            order = rank_order(execution, stage, train=train)
            # The optimizer's step is the caller's, who may have made none.
            if any(action.word is Word.UPDATE for action in self.actions):
                order += update_order(execution, stage)
        # Lengths are compared afterwards, since the first other action tells more.
        for number, (wanted, done) in enumerate(zip(order, self.actions, strict=False)):
            if wanted != done:
                return f"action {number} of the order is {wanted}, done was {done}"
        if len(order) != len(self.actions):
            return f"the order has {len(order)} actions, done were {len(self.actions)}"
        return unequal(priced_on(execution, rank, order), self.issued)


def execution_of(program: Priced) -> Execution:
    """A program as a step of one chunk."""
    if isinstance(program, Execution):
        return program
    alone = scheduled(program) if isinstance(program, Program) else program
    return Execution(chunks=(Chunk(whole=alone, micro=alone, split=None),))


def stage_of(execution: Execution, rank: int) -> int | None:
    """The stage of a rank; None for an idle one."""
    for stage, chunk in enumerate(execution.chunks[: execution.stages]):
        if rank < chunk.mesh.devices:
            return stage
        rank -= chunk.mesh.devices
    return None


def priced_on(
    execution: Execution, rank: int, order: Iterable[Action]
) -> Iterator[tuple[Action, Issued]]:
    """The priced collectives of a rank's order, without those on axes of size 1."""
    known: dict[Action, tuple[Issued, ...]] = {}
    last = execution.schedule.micro_batches - 1
    for action in order:
        # All micro-batches but the last one issue the same.
        alike = action
        if action.micro_batch is not None:
            alike = replace(action, micro_batch=last if action.micro_batch == last else 0)
        if alike not in known:
            known[alike] = tuple(_on_rank(execution, rank, alike))
        yield from ((action, issued) for issued in known[alike])


def _on_rank(execution: Execution, rank: int, action: Action) -> Iterator[Issued]:
    stage = action.chunk % execution.stages
    mesh = execution.chunks[action.chunk].mesh
    first = sum(chunk.mesh.devices for chunk in execution.chunks[:stage])
    for c in issued_by(execution, action, rank - first):
        if c.axes is None:
            yield Issued(kind=c.kind, ranks=c.ranks, nbytes=c.nbytes, most=c.most)
        elif degree_of(c.axes, mesh.shape) > 1:
            own = next(g for g in mesh.groups(c.axes) if rank - first in g)
            ranks = tuple(first + r for r in own)
            yield Issued(kind=c.kind, ranks=ranks, nbytes=c.nbytes, most=c.most)


def unequal(
    priced: Iterable[tuple[Action, Issued]], issued: Sequence[tuple[Action | None, Issued]]
) -> str:
    """The first action whose collectives differ from the priced ones, in words."""
    wanted: dict[Action | None, list[Issued]] = {}
    done: dict[Action | None, list[Issued]] = {}
    for action, collective in priced:
        wanted.setdefault(action, []).append(collective)
    for place, collective in issued:
        done.setdefault(place, []).append(collective)
    for at in dict.fromkeys((*wanted, *done)):
        here, there = _without_rows(wanted.get(at, []), done.get(at, []))
        if here != there:
            return (
                f"{at}: priced but not issued: {_count(here - there)}; "
                f"issued but not priced: {_count(there - here)}"
            )
    return ""


def _without_rows(
    priced: Sequence[Issued], issued: Sequence[Issued]
) -> tuple[Counter[Issued], Counter[Issued]]:
    """Priced and issued collectives as counters.

    Exchanges of rows that stay within their price are in neither.
    """
    unpaid = list(priced)
    rest = []
    # The largest exchange first: it has the fewest prices that cover it.
    for collective in sorted(issued, key=lambda collective: -collective.nbytes):
        fits = []
        if collective.rows:
            fits = [price for price in unpaid if _covers(price, collective)]
        if fits:
            unpaid.remove(min(fits, key=lambda price: price.most or price.nbytes))
        else:
            rest.append(collective)
    return Counter(unpaid), Counter(rest)


def _covers(price: Issued, collective: Issued) -> bool:
    same = (price.kind, price.ranks) == (collective.kind, collective.ranks)
    return same and (price.most or price.nbytes) >= collective.nbytes


def _group(handle: Any) -> dist.ProcessGroup:
    """The process group behind an operator's argument."""
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _count(collectives: Counter[Issued]) -> str:
    return ", ".join(f"{n} x {c}" for c, n in list(collectives.items())[:5]) or "none"
