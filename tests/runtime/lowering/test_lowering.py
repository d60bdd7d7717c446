"""Random plans of small graphs on real ranks: equal to one device, and issuing exactly the
collectives that are priced.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.checking import Observation, differences, observe
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.layout import format_layout
from autopar.sharding.program import Compute, Program
from tests.runtime.graphs import GRAPHS
from tests.runtime.helpers import alone, mesh_of, random_inputs, random_program, random_values


def describe(program: Program) -> str:
    """The decisions of a plan, for the message of a failure."""
    lines = [
        f"{name}: {format_layout(layout)}" for name, layout in program.assignment.storage.items()
    ]
    lines += [
        f"{s.operator.name}: {' '.join(o.name for o in s.decision.options)}"
        for s in program.steps
        if isinstance(s, Compute)
    ]
    return "\n".join(lines)


def run_programs(
    programs: list[Program], values: dict[str, torch.Tensor], inputs: list[torch.Tensor]
) -> list[tuple[Observation | None, str]]:
    """This rank's observation of every program, and how its issued collectives differ from the
    priced ones.
    """
    groups = DeviceGroups.create(programs[0].assignment.mesh)
    out = []
    for program in programs:
        module = ParallelModule(program, groups, values)
        with CollectiveLog() as log:
            outputs = module(*inputs)
            assert module.loss_index is not None
            outputs[module.loss_index].backward()
        wrong = log.mismatch(program, groups.rank)
        module.zero_grad()
        seen = observe(module, inputs, optimizer="adamw", steps=2)
        out.append((seen if dist.get_rank() == 0 else None, wrong))
    return out


@pytest.mark.parametrize(
    "seeds",
    [range(3), pytest.param(range(3, 9), marks=(pytest.mark.slow, pytest.mark.ci))],
    ids=["few", "more"],
)
@pytest.mark.parametrize("mesh", [(2,), (2, 2), (1, 4)])
@pytest.mark.parametrize("name", GRAPHS)
def test_random_plans(name: str, mesh: tuple[int, ...], seeds: range) -> None:
    graph = GRAPHS[name]()
    programs = [random_program(graph, mesh_of(mesh), seed) for seed in seeds]
    values = random_values(graph)
    inputs = random_inputs(graph)
    reference = observe(alone(graph, values), inputs, optimizer="adamw", steps=2)
    assert reference.gradients.keys() == {tensor.name for tensor in graph.parameters}
    results = run_ranks(run_programs, mesh_of(mesh).devices, programs, values, inputs, timeout=60)
    for index, program in enumerate(programs):
        for rank, result in enumerate(results):
            assert not result[index][1], f"rank {rank}: {result[index][1]}\n{describe(program)}"
        observed = results[0][index][0]
        assert observed is not None
        report = differences(reference, observed)
        assert report.passed, f"{report}\n{describe(program)}"
        assert report.excluded < 0.1 * sum(t.size for t in graph.parameters)
