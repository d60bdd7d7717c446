"""The ways of a layer's rows, to the ranks of their experts and back, in a known configuration."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costmodel.collectives import collective_time
from autopar.ir import DTYPE_BYTES
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.summed.dispatch import Dispatcher, Group, Travel, travel_seconds

from .configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A rank's tokens, and the elements of a row."""

    tokens: float
    width: int


COUNT = 8
"""Bytes of the number of rows that a rank has for an expert."""


def ways_of_rows(shape: Shape, c: Configuration, rows: Rows, group: Group) -> tuple[float, float]:
    """Return the seconds of both ways in the pass forward, and in the pass backward.

    Backward, gradients of results go to the experts as rows did, and those of rows come back. Who
    exchanges rows in all-to-alls first tells how many they are.
    """
    if group.size == 1:
        return 0.0, 0.0
    travel = Travel(
        tokens=rows.tokens,
        nbytes=rows.width * DTYPE_BYTES[c.dtype] * (c.capacity or 1.0),
        each=shape.top_k,
        ranks=shape.domains_of_a_token(group.size),
        nodes=shape.domains_of_a_token(group.nodes),
    )
    dispatcher = Dispatcher(name=c.dispatcher, sms=c.dispatcher_sms)
    # The rows of a pass go there and come back once each.
    both = sum(travel_seconds(dispatcher, way, travel, group) for way in ("dispatch", "combine"))
    told = 0.0
    # Kernels of their own tell each other the numbers while they send.
    if c.dispatcher != "node":
        counts = COUNT * group.size * shape.experts
        told = float(
            collective_time(
                "all_gather", counts, group.size, level=group.level, cluster=group.cluster
            )
        )
    return told + both, both
