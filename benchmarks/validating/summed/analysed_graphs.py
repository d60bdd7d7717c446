"""Graphs of known transformers, analysed once for all configurations, and their kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from autopar.costmodel.device.fused_chains import inside_chains
from autopar.costmodel.frameworks.kernels import LIBRARY, Kernels
from autopar.costmodel.step.covered import Seconds
from autopar.errors import UsageError
from autopar.sharding.analysis import Analysis, analyse
from benchmarks.validating.known.graph_builder import SCORES, Routed
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import Transformer, transformer

from .configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """A transformer's graph with its analysis.

    `inside`: the values inside fused chains. `seconds`: the operators priced so far.
    """

    model: Transformer
    analysis: Analysis
    inside: frozenset[str]
    seconds: dict[object, Seconds]


@functools.lru_cache(maxsize=256)
def analysed(
    shape: Shape, batch: int, dtype: str, kernels: Kernels, kinds: tuple[str, ...], routed: Routed
) -> Analysed:
    """Build and analyse a transformer once."""
    model = transformer(
        shape, batch=batch, dtype=dtype, kernels=kernels, kinds=kinds, routed=routed
    )
    analysis = analyse(model.graph, train=True)
    return Analysed(model=model, analysis=analysis, inside=inside_chains(analysis), seconds={})


def own_kernels(shape: Shape, c: Configuration) -> Kernels:
    """The kernels of a framework that it has for these sizes."""
    # Megatron-LM checks this and runs separate kernels instead (fused_softmax.py).
    lacking = (
        c.kernels.attention == LIBRARY
        and c.kernels.skips_masked
        and (c.micro_batch * shape.heads // c.tensor) % SCORES
    )
    return replace(c.kernels, attention="unfused") if lacking else c.kernels


def routed(shape: Shape, c: Configuration) -> Routed:
    """The experts of a rank. Only rows that leave one by one are sorted before they do."""
    if shape.experts % c.expert:
        raise UsageError(
            f"{shape.experts} experts do not lie evenly on {c.expert} expert-parallel ranks"
        )
    sorts = 2 if c.dispatcher == "alltoall" and c.expert > 1 else 1
    return Routed(ranks=c.expert, sorts=sorts, capacity=c.capacity)
