"""The number of calls that a host issues for a layer of experts, which the graph has as one."""

from __future__ import annotations

from autopar.costmodel.step.issued_calls import EXPERT_BIAS, EXPERT_OPERATORS, EXPERT_PRODUCTS
from benchmarks.validating.known.shape import Shape

from .configuration import Configuration

OVERLAP_NODES = 5
"""Pieces of a layer that the merged passes of two micro-batches schedule by themselves: attention,
router, dispatch, experts, combine.
"""
NODE_FORWARD = 8
NODE_BACKWARD = 5
"""Calls around a piece: waiting for and recording an event, detaching what goes in and comes out,
freeing it; backward, an engine of its own.

Counted in NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/utils.py (ScheduleNode).
"""


def calls_of_overlap(c: Configuration) -> tuple[int, int]:
    """Calls that the overlap with another micro-batch adds to a layer, in both passes."""
    nodes = OVERLAP_NODES * c.overlap_experts
    return nodes * NODE_FORWARD, nodes * NODE_BACKWARD


def calls_of_experts(shape: Shape, c: Configuration) -> int:
    """Calls that a layer of experts issues in a pass on one device."""
    # Empty places of an uneven split are issued as well.
    own = -(-shape.experts // c.expert)
    # Products of cast operands have a call for the cast as well.
    calls_of_product = 2 if c.kernels.products else 1
    biases = EXPERT_BIAS * own if shape.bias and c.kernels.biases_apart else 0
    return EXPERT_OPERATORS + EXPERT_PRODUCTS * own * calls_of_product + biases


def in_a_graph(operator: str) -> bool:
    """Whether an operator is in the graphs that Megatron-Core records of parts of a layer.

    These are attention, routers and what prepares rows (--cuda-graph-scope attn moe_router
    moe_preprocess).
    """
    # The router is the first part of a layer of experts, and its sizes do not depend on routes.
    own = ".experts" in operator and ".router" not in operator and ".scores" not in operator
    return operator.startswith("layers.") and ".mlp" not in operator and not own
