"""What this thread is doing, for those who watch: the action of the order, and the kind of an exchange that its sizes do not tell."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from autopar.order.actions import Action

NAMED = "autopar:"
"""How the names of actions begin that profilers show."""


class Present(threading.local):
    """`action`: the one at hand; `log`: where actions are written down, if anywhere; `exchange`: "send", "rows" or "batch".

    `aside`: what is said among the ranks is no part of a step.
    """

    action: Action | None = None
    log: list[Action] | None = None
    exchange: str = ""
    aside: bool = False


PRESENT = Present()


@contextmanager
def at(action: Action | None) -> Iterator[None]:
    """Inside, what is issued belongs to `action`."""
    before, PRESENT.action = PRESENT.action, action
    try:
        yield
    finally:
        PRESENT.action = before


def named(action: Action) -> AbstractContextManager[object]:
    """Inside, profilers show the action, if one watches: the name alone would cost microseconds."""
    watched = torch._C._autograd._profiler_enabled()
    return torch.profiler.record_function(f"{NAMED}{action}") if watched else nullcontext()


@contextmanager
def aside() -> Iterator[None]:
    """Inside, ranks agree on something; that is no part of a step."""
    before, PRESENT.aside = PRESENT.aside, True
    try:
        yield
    finally:
        PRESENT.aside = before


@contextmanager
def exchanging(kind: str) -> Iterator[None]:
    """Inside, an all-to-all of unequal parts is a "send" to one rank, or "rows" whose number depends on data; "batch": parts are joined."""
    before, PRESENT.exchange = PRESENT.exchange, kind
    try:
        yield
    finally:
        PRESENT.exchange = before
