"""Seconds that a message adds to the computation of a part that covers it."""

from __future__ import annotations

from autopar.costmodel.step.covered import SLOWDOWN, Seen


def exposed(communication: float, cover: float, slowdown: float = SLOWDOWN["nccl"]) -> float:
    """Return the excess of a message over what covers it, and the slowdown of the latter."""
    return Seen.of(communication, cover).seconds(slowdown)
