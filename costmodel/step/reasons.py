"""Why a step is longer than the computation of its passes: the reasons, which add up to that."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why no pass computes, or computes slower; the value is its name in print."""

    GATHERS = "gathers of parameters"
    REDUCTIONS = "reductions of gradients"
    VALUES = "values"
    BUBBLE = "bubble of stages"
    MESSAGES = "messages between stages"
    SLOWED = "slowed beside transfers"
    END = "end of the step"
    UPDATE = "update"
