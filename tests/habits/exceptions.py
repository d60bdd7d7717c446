"""What is neither right nor refused, with the reason: the exceptions that the page states."""

from __future__ import annotations

from collections.abc import Mapping

STAGES = ("1f1b", "zero bubble", "interleaved")
SPLIT = ("zero3", "megatron")

Where = Mapping[str, tuple[str, ...]]
"""Plans by the words that begin a habit's description."""
EXCEPTIONS: Mapping[str, Where] = {}


def exception_of(habit: str, plan: str) -> str | None:
    """The text of the exception that holds for a habit under a plan; None if there is none."""
    for text, where in EXCEPTIONS.items():
        if any(habit.startswith(words) and plan in plans for words, plans in where.items()):
            return text
    return None
