"""`CollectiveLog`: the collectives that a rank issues, to be held against those that its program prices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.order.execution import Execution
from autopar.order.scheduled import Scheduled
from autopar.sharding.program import Program

from .collectives import PRICE

Priced = Program | Scheduled | Execution
"""What lists collectives: a program by itself, under a schedule, or a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One collective that a rank has issued; `nbytes` by the convention of its kind, as in the program's list."""

    phase: str
    kind: str
    ranks: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.phase} {self.kind} of {self.nbytes} B among ranks {', '.join(map(str, self.ranks))}"


_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class CollectiveLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the functional collectives issued inside it, in the forward and in the backward pass.

    with CollectiveLog() as log: module(*inputs)[module.loss_index].backward()
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issued: list[Issued] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name in _KINDS:
            size = out if name == "all_gather_into_tensor" else args[0]
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            ranks = self.members(args[-1])
            kind, nbytes = PRICE.stated or (_KINDS[name], size.numel() * size.element_size())
            self.issued.append(Issued(phase=phase, kind=kind, ranks=ranks, nbytes=nbytes))
        return out

    def members(self, name: Any) -> tuple[int, ...]:
        """The ranks of a group."""
        return tuple(dist.get_process_group_ranks(_resolve_process_group(name)))

    def against(self, program: Priced, rank: int) -> tuple[Counter[Issued], Counter[Issued]]:
        """What the program prices but was not issued, and what was issued but is not priced (axes of size 1 are silent)."""
        priced, issued = Counter(priced_on(program, rank)), Counter(self.issued)
        return priced - issued, issued - priced

    def mismatch(self, program: Priced, rank: int) -> str:
        """How the issued collectives differ from the priced ones, in words; empty where they are the same.

        Those of the forward pass must also come in the priced order. In the backward pass autograd decides the order, the
        same one on every rank.
        """
        missing, extra = self.against(program, rank)
        if missing or extra:
            return f"priced but not issued: {_count(missing)}; issued but not priced: {_count(extra)}"
        priced = [c for c in priced_on(program, rank) if c.phase == "forward"]
        issued = [c for c in self.issued if c.phase == "forward"]
        for number, (wanted, found) in enumerate(zip(priced, issued, strict=True)):
            if wanted != found:
                return f"collective {number} of the forward pass is priced as {wanted}, issued as {found}"
        return ""


def priced_on(program: Priced, rank: int) -> tuple[Issued, ...]:
    """What the program (under its schedule) prices for this rank, in its order, without axes of size 1."""
    program = program.micro if isinstance(program, Execution) else program
    mesh = (program.program if isinstance(program, Scheduled) else program).assignment.mesh
    own = {axis: next(g for g in mesh.groups(axis) if rank in g) for axis in range(len(mesh.axes))}
    return tuple(
        Issued(phase=c.phase, kind=c.kind, ranks=own[c.axis], nbytes=c.nbytes) for c in program.collectives() if mesh.shape[c.axis] > 1
    )


def _count(found: Counter[Issued]) -> str:
    return ", ".join(f"{n} x {c}" for c, n in list(found.items())[:5]) or "none"
