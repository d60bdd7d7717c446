"""The tables of a step on one device: the arithmetic alone, without any limit."""

from __future__ import annotations

from autopar.costmodel import Cluster
from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.model.counts import Counts, Segments
from autopar.planning.space import Multiplicities
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh

from .build import build_tables
from .tables import Tables


def tables_alone(
    analysis: Analysis, cluster: Cluster, counts: Counts, segments: Segments = ()
) -> tuple[Tables, Multiplicities]:
    """The tables of a step on one device without limits, and their multiplicities.

    `segments`: the operators that are computed again.
    """
    work = Multiplicities(counts=counts, segments=segments)
    alone = MeshPrices(cluster=cluster.sized(1), mesh=Mesh(axes=()))
    return build_tables(analysis, alone, optimizer="none", work=work), work


def weight_share(tables: Tables, work: Multiplicities) -> float:
    """The share of a pass that computes gradients of weights, on one device."""
    passed = weights = 0.0
    for op in tables.analysis.warm:
        offer = tables.analysis.offers[op.name]
        count = work.counts.operators.get(op.name, 1)
        gradients = tables.analysis.as_offered(op, tables.analysis.gradients)
        parts = operator_parts(
            offer.call, tables.strategies[op.name], (), tables.prices.cluster, gradients
        )
        passed += count * float(parts.forward[0] + parts.backward[0])
        weights += count * float(parts.weight[0])
    return weights / passed if passed else 0.0


def longest_operator(tables: Tables, work: Multiplicities) -> float:
    """The seconds of the longest operator of a step on one device, all its passes together."""
    return max(
        float(seconds.min()) / work.counts.operators.get(variable.name, 1)
        for variable, seconds in zip(tables.variables, tables.graph.unary, strict=True)
        if variable.what == "operator"
    )
