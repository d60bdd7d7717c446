"""Seconds of the operators of a known model on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import Framework
from autopar.costmodel.step.covered import Seconds
from autopar.costmodel.step.estimate import step_seconds
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import R
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Compute
from autopar.sharding.program_builder import build_program
from benchmarks.validating.known import Shape
from benchmarks.validating.known.transformer import transformer
from tests.sharding.direct_assignment import pinned_assignment


def operator_seconds(
    shape: Shape, cluster: Cluster, work: Framework, *, dtype: str = "bfloat16"
) -> Mapping[str, Seconds]:
    """The seconds of every operator of one layer, with its ends, by name."""
    shape = replace(shape, layers=1)
    analysis = analyse(
        transformer(shape, batch=1, dtype=dtype, kernels=work.kernels).graph, train=True
    )
    here = cluster.sized(1).run_by(work)
    mesh = Mesh(axes=(Axis(name="one", size=1, level=here.levels[0].name),))
    wanted = {op.name: (R,) for op in analysis.graph.operators}
    program = build_program(analysis.graph, pinned_assignment(analysis, mesh, wanted))
    prices = MeshPrices(cluster=here, mesh=mesh)
    return {
        step.operator.name: step_seconds(step, analysis, prices)
        for step in program.steps
        if isinstance(step, Compute)
    }
