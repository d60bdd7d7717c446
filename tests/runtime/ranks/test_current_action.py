"""The present state of a program: known on threads of autograd, no obstacle to compilation."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from autopar.order.actions import Action, Word
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.current_action import aside, at, exchanging, present
from autopar.runtime.strict_backend.autograd_threads import run_backward_on_a_thread

BACKWARD = Action(word=Word.BACKWARD, chunk=0, micro_batch=2)


class _Noting(torch.autograd.Function):
    """A node that notes what is known where its gradient is made."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, notes: list[tuple[bool, str, bool, str]]) -> Tensor:
        ctx.notes = notes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        state = present()
        here = threading.current_thread() is threading.main_thread()
        ctx.notes.append((here, str(state.action), state.aside, state.exchange))
        return gradients[0], None


def _noted() -> list[tuple[bool, str, bool, str]]:
    """Two backward passes on another thread, inside an action and outside."""
    run_backward_on_a_thread()
    notes: list[tuple[bool, str, bool, str]] = []
    x = torch.ones(2, requires_grad=True)
    with at(BACKWARD), aside(), exchanging("rows"):
        _Noting.apply(x, notes).sum().backward()  # type: ignore[no-untyped-call]
    _Noting.apply(x, notes).sum().backward()  # type: ignore[no-untyped-call]
    return notes


def test_a_thread_of_autograd_knows_the_state_of_the_pass() -> None:
    # In a process of its own, since the passes of a process go to the thread for good.
    assert run_ranks(_noted, 1, timeout=60.0) == [
        [(False, "0B2", True, "rows"), (False, "None", False, "")]
    ]


def test_an_exchange_is_compiled_whole() -> None:
    def doubled(value: Tensor) -> Tensor:
        with exchanging("send"):
            return 2 * value

    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
