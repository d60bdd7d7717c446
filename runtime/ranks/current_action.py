"""This thread's present action and the kind of its exchange, for logs and profilers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from autopar.order.actions import Action

NAMED = "autopar:"
"""Prefix of the names of actions in profilers."""


# Autograd runs backward passes on threads of its own: each has an action of its own.
class Present(threading.local):
    """The present state of a thread.

    `action`: the present one. `log`: the list in which actions are recorded, if any. `exchange`:
    "send", "rows" or "batch". `aside`: inside, messages among the ranks are no part of a step.
    """

    action: Action | None = None
    log: list[Action] | None = None
    exchange: str = ""
    aside: bool = False


PRESENT = Present()


@contextmanager
def at(action: Action | None) -> Iterator[None]:
    """Inside, issued collectives belong to `action`."""
    before = PRESENT.action
    PRESENT.action = action
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
    """Inside, messages are agreements among ranks, no part of a step."""
    before = PRESENT.aside
    PRESENT.aside = True
    try:
        yield
    finally:
        PRESENT.aside = before


@contextmanager
def exchanging(kind: str) -> Iterator[None]:
    """Inside, uneven all-to-alls are of this kind.

    "send": to one rank; "rows": in numbers that depend on data; "batch": parts of a batch.
    """
    before = PRESENT.exchange
    PRESENT.exchange = kind
    try:
        yield
    finally:
        PRESENT.exchange = before
