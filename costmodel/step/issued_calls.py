"""Calls that a framework's host issues for the operators of a step.

A host issues one after the other, each for as long as its device says (`Device.dispatch`), and runs
ahead of the device. It is another clock: computation starts when both are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.device import scan_kernels
from autopar.ir import Graph
from autopar.sharding.layout import Kind
from autopar.sharding.program import Compute
from autopar.sharding.rules import Call
from autopar.sharding.rules.experts import EXPERTS, is_biased
from autopar.sharding.rules.recurrent import STATE_SPACE

from .covered import Seconds

EXPERT_OPERATORS = 20
"""Operators of a layer of experts besides its products: sorts of rows, exchanges, activation.

Counted in megatron/core/transformer/moe: token_dispatcher.py and moe_utils.py (fused permutation).
"""
EXPERT_PRODUCTS = 2
"""Products of an expert: each a call of its own, as is the cast of its rows (TransformerEngine,
GroupedLinear).
"""


EXPERT_BIAS = 2
"""Calls for the last bias of an expert: it is weighed and added (experts.py, _apply_bias)."""


class Host:
    """The host of one rank: the seconds that it issues calls of a program's operators for."""

    def __init__(self, graph: Graph, mesh: Sequence[int], cluster: Cluster) -> None:
        self.mesh = mesh
        habits = cluster.framework.habits
        self.graph = graph
        self.graphed = habits.graphed
        self.biases_apart = cluster.framework.kernels.biases_apart
        self.narrow = bool(cluster.framework.kernels.products)
        self.blocking = habits.blocking
        self.seconds_of_call = cluster.seconds_of_call

    def issues(self, step: Compute, seconds: Seconds) -> tuple[float, float]:
        """The seconds for which an operator is issued, forward and backward."""
        if not self.seconds_of_call:
            return 0.0, 0.0
        ahead, back = self._calls(step, seconds)
        return self.seconds_of_call * ahead, self.seconds_of_call * back

    def _calls(self, step: Compute, seconds: Seconds) -> tuple[int, int]:
        kind = step.operator.kind
        if self.graphed and kind != EXPERTS:
            return 0, 0
        if kind == STATE_SPACE:
            return scan_kernels.FORWARD, scan_kernels.BACKWARD
        calls = 1
        if kind == EXPERTS:
            each = EXPERT_PRODUCTS * (2 if self.narrow else 1)
            if self.biases_apart and is_biased(Call.of(self.graph, step.operator)):
                each += EXPERT_BIAS
            calls = EXPERT_OPERATORS + each * self._experts(step)
        return calls, calls * ((seconds.backward > 0) + (seconds.weight > 0))

    def _experts(self, step: Compute) -> int:
        """The experts of a rank."""
        own = [
            self.graph.tensors[name].shape[0]
            // math.prod(
                size
                for size, placement in zip(self.mesh, layout, strict=True)
                if placement.kind is Kind.SPLIT and placement.dim == 0
            )
            for name, layout in zip(step.operator.inputs, step.decision.inputs, strict=True)
            if len(self.graph.tensors[name].shape) == 3
        ]
        return max(own, default=1)
