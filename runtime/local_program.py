"""`LocalProgram`: what one rank runs, of the whole batch or of one micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.sharding.layout import Layout, Placement
from autopar.sharding.time_split import TimeSplit

from .kept import Kept, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """One of `count` micro-batches: its coordinate on the axis of time, and how the model lies there."""

    split: TimeSplit
    count: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """What one rank runs: `module(*parameters, *constants, *inputs)` gives the local outputs as a tuple.

    Parameters come as local shards of their storage layouts (or as DTensors), constants and inputs whole; `outputs` pairs every output
    with its layout: the graph's outputs in order, then the loss where it is none of them. Behind the outputs come the whole new
    values of the constants `updates`.

    A micro-batch takes `sources` in place of constants and inputs, each cut as its placement on the axis of time says, the results of the
    preamble among them; of `updates` it gives those that are `updated`. The layouts of `outputs` are those of all micro-batches joined.
    """

    module: fx.GraphModule
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Layout], ...]
    updates: tuple[str, ...]
    loss: int | None
    sources: tuple[tuple[str, Placement], ...] = ()
    updated: tuple[str, ...] = ()


class Machinery:
    """What the lowered micro-batches of a rank share: how far the step is, and the values that are kept from one to the next."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.kept: dict[int, Kept] = {}


def called(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function under a name, which a `torch.fx` graph needs."""

    def call(*values: torch.Tensor) -> Any:
        return function(*values)

    call.__name__ = call.__qualname__ = name
    return call


def identifier(name: str) -> str:
    """A readable Python identifier out of a tensor's or operator's name."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return text if text and not text[0].isdigit() else f"v_{text}"
