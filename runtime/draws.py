"""Which random numbers are drawn now: the seed, the step, and whether they are to be those of torch's own generator.

A runner says so before a forward pass, and again before a recomputation; what operators draw then depends on nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """`exact`: as one device of torch, from its global generator, in the order of the program; else by counter, in any order."""

    seed: int = 0
    step: int = 0
    exact: bool = False


class _Stack(threading.local):
    """The draws of this thread, the innermost last."""

    def __init__(self) -> None:
        self.items: list[Draws] = []


_STACK = _Stack()
_TORCH = Draws(exact=True)


@contextlib.contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Make `draws` those of this thread."""
    _STACK.items.append(draws)
    try:
        yield
    finally:
        _STACK.items.pop()


def current() -> Draws:
    """The draws of this thread; where nobody has said, torch's own generator goes on."""
    return _STACK.items[-1] if _STACK.items else _TORCH


def operator_number(name: str) -> int:
    """A number for an operator's name, the same in every process.

    >>> operator_number("layers.0.dropout")
    7428972498533421184
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
