"""The present source of random numbers: seed, step, and whether torch's own generator is used.

The runner sets it before a forward pass, and again before a recomputation, which so draws the same
numbers; the draws of operators depend on nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The source of random numbers.

    `exact`: torch's global generator, in the order of the program, as on one device; else by
    counter, in any order.
    """

    seed: int = 0
    step: int = 0
    exact: bool = False


# Autograd recomputes on threads of its own, where the caller's draws would be another's.
class _Stack(threading.local):
    """The draws of this thread, the innermost last."""

    def __init__(self) -> None:
        self.items: list[Draws] = []


_STACK = _Stack()
_TORCH = Draws(exact=True)


@contextlib.contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Use `draws` in this thread."""
    _STACK.items.append(draws)
    try:
        yield
    finally:
        _STACK.items.pop()


def current() -> Draws:
    """The draws of this thread; by default torch's own generator."""
    return _STACK.items[-1] if _STACK.items else _TORCH


def operator_number(name: str) -> int:
    """A number for an operator's name, the same in every process.

    >>> operator_number("layers.0.dropout")
    7428972498533421184
    """
    # Python's own hash differs between processes. The shift leaves room for a sign.
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
