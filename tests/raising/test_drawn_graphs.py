"""Raised graphs equal the unraised ones, in outputs, gradients and updates, alone and on ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from autopar.ir.bodies import POINTWISE
from autopar.raising import raised
from autopar.runtime.checking import Observation, differences, observe
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from tests.raising.drawn_graphs import drawn_graph
from tests.runtime.helpers import alone, mesh_of, random_inputs, random_program, random_values

FEW = range(30)
ALL = pytest.param(range(300), marks=(pytest.mark.slow, pytest.mark.ci))


def _alone(seed: int) -> Observation:
    graph = drawn_graph(seed)
    return observe(alone(graph, random_values(graph)), random_inputs(graph), optimizer="adamw")


@pytest.mark.parametrize("seeds", [FEW, ALL], ids=["few", "all"])
def test_raised_graphs_on_one_device(seeds: range) -> None:
    kinds: set[str] = set()
    for seed in seeds:
        graph = raised(drawn_graph(seed))
        kinds.update(operator.kind for operator in graph.operators)
        values = random_values(drawn_graph(seed))
        seen = observe(alone(graph, values), random_inputs(graph), optimizer="adamw")
        report = differences(_alone(seed), seen)
        assert report.passed, f"{seed}: {report}"
    # What is drawn has what is raised.
    assert kinds > {POINTWISE, "aten.gelu.default", "aten.rms_norm.default", "aten.silu.default"}


def _on_rank(seeds: Sequence[int], sizes: tuple[int, ...]) -> list[Observation | None]:
    groups = DeviceGroups.create(mesh_of(sizes))
    seen = []
    for seed in seeds:
        graph = raised(drawn_graph(seed))
        program = random_program(graph, mesh_of(sizes), seed)
        module = ParallelModule(program, groups, random_values(drawn_graph(seed)))
        observed = observe(module, random_inputs(graph), optimizer="adamw")
        seen.append(observed if dist.get_rank() == 0 else None)
    return seen


@pytest.mark.parametrize("seeds", [FEW, ALL], ids=["few", "all"])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_raised_graphs_on_ranks(seeds: range, sizes: tuple[int, ...]) -> None:
    results = run_ranks(_on_rank, mesh_of(sizes).devices, list(seeds), sizes, timeout=600.0)
    for seed, observed in zip(seeds, results[0], strict=True):
        assert observed is not None
        report = differences(_alone(seed), observed)
        assert report.passed, f"{seed}: {report}"
