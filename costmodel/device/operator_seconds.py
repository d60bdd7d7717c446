"""Seconds of an operator under every strategy, forward and backward, on its local shapes.

forward    the roofline of its products and of the bytes that it reads and writes
backward   an equally large product for every operand with a gradient; else the bytes of gradients
           and saved values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.frameworks import OWN
from autopar.ir.stored_products import LINEAR_LOSS
from autopar.sharding.communication import visited
from autopar.sharding.notation import local_elements
from autopar.sharding.rules import Call
from autopar.sharding.rules.contraction import INDEX_SCORES
from autopar.sharding.rules.experts import EXPERTS
from autopar.sharding.rules.recurrent import TRITON_SCAN
from autopar.sharding.strategies import Strategies

from . import Device
from .expert_layers import Layer
from .index_scores import index_scores_seconds
from .losses import linear_loss_seconds, loss_seconds
from .operator_kernels import OperatorKernels, computed_in, local_sizes
from .scan_kernels import ScanKernels
from .scans import SCANS, Scan

Floats = NDArray[np.float64]

CROSS_ENTROPY = "aten.cross_entropy_loss.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSeconds:
    """Seconds of every strategy of an operator, arrays [strategies].

    `weight` is the part of `backward` that makes the gradients of parameters.
    """

    forward: Floats
    backward: Floats
    weight: Floats


def operator_parts(
    call: Call,
    strategies: Strategies,
    mesh: Sequence[int],
    cluster: Cluster,
    gradients: frozenset[str],
) -> OperatorSeconds:
    """Return the seconds of every strategy of an operator."""
    parts = _of_kernels(call, strategies, mesh, cluster, gradients)
    started = cluster.host_seconds("operator")
    if not started:
        return parts
    trained = any(tensor.name in gradients for tensor in call.outputs)
    return OperatorSeconds(
        forward=parts.forward + started,
        backward=parts.backward + (started if trained else 0.0),
        weight=parts.weight,
    )


def _of_kernels(
    call: Call,
    strategies: Strategies,
    mesh: Sequence[int],
    cluster: Cluster,
    gradients: frozenset[str],
) -> OperatorSeconds:
    """The seconds of the kernels alone."""
    if call.operator.kind == EXPERTS:
        local = local_sizes(strategies, mesh)
        layer = Layer(call, strategies, mesh, local, cluster, gradients)
        return OperatorSeconds(
            forward=layer.forward(), backward=layer.backward(), weight=layer.weight()
        )
    if call.operator.kind in SCANS:
        return _of_scan(call, strategies, mesh, cluster.device, gradients)
    passes = _without_weights(call, strategies, mesh, cluster, gradients)
    if passes is not None:
        nothing = np.zeros(len(passes[0]))
        trained = any(t.name in gradients for t in call.outputs)
        return OperatorSeconds(
            forward=passes[0], backward=passes[1] if trained else nothing, weight=nothing
        )
    work = OperatorKernels(call, strategies, mesh, cluster, gradients)
    # Ring attention runs its kernel once for each block of keys that passes by.
    rounds = visited(strategies, tuple(mesh))
    return OperatorSeconds(
        forward=rounds * work.forward(),
        backward=rounds * work.backward(),
        weight=rounds * work.weight(),
    )


def _without_weights(
    call: Call,
    strategies: Strategies,
    mesh: Sequence[int],
    cluster: Cluster,
    gradients: frozenset[str],
) -> tuple[Floats, Floats] | None:
    """The seconds of both passes of what is told apart, but for gradients of parameters."""
    rule = strategies.rule
    kind = call.operator.kind
    if kind not in (INDEX_SCORES, LINEAR_LOSS, CROSS_ENTROPY):
        return None
    local = local_sizes(strategies, mesh)
    if kind == INDEX_SCORES:
        return index_scores_seconds(rule, local, cluster.device)
    if kind == LINEAR_LOSS:
        return linear_loss_seconds(call, rule, local, cluster, gradients)
    if cluster.framework.name == OWN:
        return None
    return loss_seconds(local_elements(rule.inputs[0], local), cluster)


def _of_scan(
    call: Call,
    strategies: Strategies,
    mesh: Sequence[int],
    device: Device,
    gradients: frozenset[str],
) -> OperatorSeconds:
    """The seconds of a scan, whose vectors of parameters need no product of their own."""
    local = local_sizes(strategies, mesh)
    # Frameworks run kernels of their own, plans the operators of torch.
    form: type[Scan] | type[ScanKernels] = Scan
    if call.get("kernel") == TRITON_SCAN:
        form = ScanKernels
    scan = form(call, strategies.rule, local, computed_in(call.inputs[:1]), device)
    trained = any(t.name in gradients for t in call.outputs)
    nothing = np.zeros(len(local))
    return OperatorSeconds(
        forward=scan.forward(), backward=scan.backward() if trained else nothing, weight=nothing
    )


def operator_seconds(
    call: Call,
    strategies: Strategies,
    mesh: Sequence[int],
    cluster: Cluster,
    gradients: frozenset[str],
) -> tuple[Floats, Floats]:
    """Forward and backward seconds of every strategy of an operator: two arrays [strategies]."""
    parts = operator_parts(call, strategies, mesh, cluster, gradients)
    return parts.forward, parts.backward
