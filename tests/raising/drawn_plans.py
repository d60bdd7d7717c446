"""Drawn plans of a raised graph, run on forked ranks beside one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.ir import Graph
from autopar.runtime.checking import differences, observe
from autopar.runtime.launch import run_ranks
from tests.runtime.helpers import alone, mesh_of, random_program
from tests.runtime.lowering.test_lowering import run_programs


def drawn_plans_equal(
    graph: Graph,
    values: Mapping[str, Any],
    given: Sequence[Tensor],
    sizes: tuple[int, ...],
    *,
    written: Graph | None = None,
    plans: int = 6,
) -> None:
    """Two steps of drawn plans on a mesh are those of one device, of the graph as it is `written`.

    `values`: parameters and constants. Raises `AssertionError` with what differs.
    """
    programs = [random_program(graph, mesh_of(sizes), seed) for seed in range(plans)]
    observed = run_ranks(run_programs, mesh_of(sizes).devices, programs, values, given)
    wanted = observe(alone(written or graph, values), given, steps=2)
    for (seen, wrong), program in zip(observed[0], programs, strict=True):
        assert not wrong, wrong
        assert seen is not None
        report = differences(wanted, seen, graph=program.graph)
        assert report.passed, str(report)
