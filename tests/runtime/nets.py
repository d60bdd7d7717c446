"""A small network on ranks: plans of it by hand, and what a rank finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.order.execution import Execution, execution
from autopar.order.plan_on_mesh import Decided
from autopar.order.stages import Pipelined, staged_execution
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.ranks.world import World
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import Placement, R, S
from autopar.sharding.schedule import Schedule
from tests.runtime.helpers import mesh_of
from tests.sharding.direct_assignment import pinned_assignment

MODES: Mapping[str, Mapping[str, Any]] = {
    "once": {"gathered": "per_step", "accumulated": "whole"},
    "shards": {"gathered": "per_step", "accumulated": "shards"},
    "per_pass": {"gathered": "per_pass", "accumulated": "shards"},
}


class Net(nn.Module):
    """Layers and their loss: a fused weight, a frozen one, one that is used twice, and one that the
    loss does not reach.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.twice = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.frozen = nn.Linear(16, 16, bias=False)
        self.aside = nn.Linear(16, 4)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and what it does not read."""
        h = torch.tanh(self.twice(torch.tanh(self.first(x))))
        h = torch.tanh(self.twice(self.frozen(h)))
        return self.last(h).square().mean(), self.aside(h)


def net(rows: int = 8) -> tuple[Net, Analysis, Tensor]:
    """The network in float64, its analysis, and an input of so many rows."""
    torch.manual_seed(0)
    module = Net().double()
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = load_model(module, ModelOptions(train=True), (x,))
    return module, analyse(model.graph, train=True), x


def _wanted(analysis: Analysis, sizes: Sequence[int]) -> dict[str, list[Placement]]:
    """The batch over the first axis, columns of matrix products over others."""
    results = {}
    for op in analysis.warm:
        call = analysis.offers[op.name].call
        others = S(1) if "linear" in op.kind and call.outputs[0].shape else R
        results[op.name] = [S(0), *([others] * (len(sizes) - 1))]
    return results


def planned(
    analysis: Analysis,
    sizes: Sequence[int],
    *,
    split: bool = True,
    schedule: Schedule | None = None,
) -> Execution:
    """The batch over the first axis, columns of matrix products over others; with `split`
    parameters are stored split over all axes.
    """
    mesh = mesh_of(tuple(sizes))
    assignment = pinned_assignment(
        analysis, mesh, _wanted(analysis, sizes), split_storage=range(len(sizes)) if split else ()
    )
    return execution(assignment, analysis, schedule or Schedule())


def pipelined(
    analysis: Analysis,
    sizes: Sequence[tuple[int, ...]],
    *,
    pipeline: str = "1f1b",
    interleave: int = 1,
    schedule: Schedule | None = None,
    hybrid: bool = False,
) -> Execution:
    """The same in stages on meshes of these sizes, which hold equal numbers of operators;
    parameters are stored split. With `hybrid` all axes split the batch, and only the last one
    stores parameters split.
    """
    meshes = [mesh_of(mesh) for mesh in sizes]
    result = {}
    for mesh in meshes:
        count = len(mesh.axes)
        wanted = _wanted(analysis, mesh.shape)
        if hybrid:
            wanted = {op.name: [S(0)] * count for op in analysis.warm}
        stored = (count - 1,) if hybrid else range(count)
        result[mesh] = pinned_assignment(analysis, mesh, wanted, split_storage=stored)
    first = result[meshes[0]]
    decided = Decided(
        decide=lambda name, mesh: result[mesh].decisions[name],
        storage=first.storage,
        outputs=first.outputs,
        chains={},
        host=frozenset(),
    )
    names = [op.name for op in analysis.warm]
    count = len(sizes) * interleave
    cut = Pipelined(
        firsts=[names[number * len(names) // count] for number in range(count)],
        meshes=meshes * interleave,
        pipeline=pipeline,
        interleave=interleave,
        schedule=schedule or Schedule(micro_batches=2),
    )
    return staged_execution(analysis, decided, cut)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by name."""
    return {name: value.detach() for name, value in module.named_parameters()}


def gradients_alone(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """The gradients of the loss on one device; None where a parameter has none."""
    module.zero_grad()
    module(x)[0].backward()
    return {name: p.grad for name, p in module.named_parameters()}


def whole_gradients(module: ParallelModule) -> dict[str, Tensor | None]:
    """The gradients of a planned module, whole on every rank."""
    gradients = {
        name: p.grad for name, p in module.graph_parameters().items() if p.grad is not None
    }
    whole = module.full_values(gradients)
    return {tensor.name: whole.get(tensor.name) for tensor in module.engine.graph.parameters}


def on_this_rank(plan: Execution, module: nn.Module) -> ParallelModule:
    """The planned module."""
    return ParallelModule(
        plan, World.of(plan), parameters_of(module), options=ModuleOptions(exact_random=True)
    )


def require_equal(actual: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> None:
    """All gradients are the same, and those that are None too."""
    assert actual.keys() <= wanted.keys()
    for name, value in actual.items():
        other = wanted[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            torch.testing.assert_close(
                value, other, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def trained(
    plans: Sequence[Execution], module: Net, x: Tensor, wanted: Mapping[str, Tensor | None]
) -> list[str]:
    """The differences of the logs from the orders; gradients are compared here."""
    differences = []
    for plan in plans:
        ours = on_this_rank(plan, module)
        with CollectiveLog() as log:
            ours.loss(x).backward()  # type: ignore[no-untyped-call]
        require_equal(whole_gradients(ours), wanted)
        differences.append(log.mismatch(plan, dist.get_rank()))
    return differences
