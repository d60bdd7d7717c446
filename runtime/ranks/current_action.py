"""The present action of the program and the kind of its exchange, for logs and profilers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from autopar.order.actions import Action
from autopar.runtime.torch_versions import stash

NAMED = "autopar:"
"""Prefix of the names of actions in profilers."""
CARRIED = "autopar.present"
"""The name of the present state in torch's thread-local storage."""


@dataclass(slots=True)
class Present:
    """The present state of a program.

    `action`: the present one. `log`: the list in which actions are recorded, if any. `exchange`:
    "send", "rows" or "batch". `aside`: inside, messages among the ranks are no part of a step.
    """

    action: Action | None = None
    log: list[Action] | None = None
    exchange: str = ""
    aside: bool = False


def present() -> Present:
    """The state of this thread; a thread of autograd has that of the one that began the pass."""
    # On CUDA nodes of a backward pass run on a thread of their device. torch carries this storage
    # there, and Python's own thread-local storage it does not.
    if not torch._C._is_key_in_tls(CARRIED):
        stash(CARRIED, Present())
    state: Present = torch._C._get_obj_in_tls(CARRIED)
    return state


@contextmanager
def at(action: Action | None) -> Iterator[None]:
    """Inside, issued collectives belong to `action`."""
    state = present()
    before = state.action
    state.action = action
    try:
        yield
    finally:
        state.action = before


def named(action: Action) -> AbstractContextManager[object]:
    """Inside, profilers show the action, if one watches: the name alone would cost microseconds."""
    watched = torch._C._autograd._profiler_enabled()
    return torch.profiler.record_function(f"{NAMED}{action}") if watched else nullcontext()


def record(action: Action) -> None:
    """Let a log have the action as the next one, if there is a log."""
    log = present().log
    if log is not None:
        log.append(action)


@contextmanager
def aside() -> Iterator[None]:
    """Inside, messages are agreements among ranks, no part of a step."""
    state = present()
    before = state.aside
    state.aside = True
    try:
        yield
    finally:
        state.aside = before


@contextmanager
def exchanging(kind: str) -> Iterator[None]:
    """Inside, uneven all-to-alls are of this kind.

    "send": to one rank; "rows": in numbers that depend on data; "batch": parts of a batch.
    """
    # A compiled graph keeps the collective alone, and no log knows its kind.
    if torch.compiler.is_compiling():
        yield
        return
    state = present()
    before = state.exchange
    state.exchange = kind
    try:
        yield
    finally:
        state.exchange = before
