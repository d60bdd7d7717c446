"""`ParallelModule` in ordinary training code: state dicts, DTensors, optimizers, clipping,
accumulation, checkpoints.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.order.scheduled import scheduled
from autopar.order.unit_collectives import reduce_rounds
from autopar.runtime.checking import compare
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.torch_layouts import device_mesh, placements_of
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.layout import format_layout
from autopar.sharding.program import Program
from autopar.sharding.schedule import Types
from tests.runtime.graphs import GRAPHS, mlp
from tests.runtime.helpers import alone, mesh_of, random_inputs, random_program, random_values
from tests.sharding.storing import storage_layouts


def _placements(sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[str]:
    """The storage layouts whose DTensor does not gather to the whole tensor."""
    groups = DeviceGroups.create(mesh_of(sizes))
    mesh = device_mesh(groups, "cpu")
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    wrong = []
    for layout in storage_layouts(shape, sizes, {0: (1, 3), 1: (1, 2)}):
        local = shard_of(whole, cuts_of(layout, sizes, groups.coordinate)).contiguous()
        placed = DTensor.from_local(
            local,
            mesh,
            placements_of(layout, sizes),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        if not torch.equal(placed.full_tensor(), whole):
            wrong.append(format_layout(layout))
    return wrong


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 2, 2)])
def test_storage_layouts_are_dtensor_placements(sizes: tuple[int, ...]) -> None:
    """Every storage layout, splits within parts included, gathers as a DTensor to the whole
    parameter.
    """
    assert (
        run_ranks(_placements, mesh_of(sizes).devices, sizes, (48, 32))
        == [[]] * mesh_of(sizes).devices
    )


def _train(module: ParallelModule, inputs: list[Tensor], clip: float) -> list[float]:
    """Three steps of AdamW with accumulation over two backward passes and gradient clipping; losses
    and norms.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    seen = []
    for _ in range(3):
        with module.no_sync():
            module(*inputs)[module.loss_index].backward()
        module(*[value * 0.5 for value in inputs])[module.loss_index].backward()
        loss = module(*inputs)[module.loss_index]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        seen += [loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _train_all(
    programs: list[Program], values: dict[str, Tensor], inputs: list[Tensor]
) -> list[list[float]]:
    groups = DeviceGroups.create(programs[0].assignment.mesh)
    return [_train(ParallelModule(program, groups, values), inputs, 0.1) for program in programs]


def test_training_with_accumulation_and_clipping() -> None:
    """Shares accumulate inside `no_sync`, sums outside of it; the clipped norm is that of one
    device.
    """
    graph = mlp()
    values = random_values(graph)
    inputs = random_inputs(graph)
    programs = [random_program(graph, mesh_of((2, 2)), seed) for seed in range(30, 34)]
    assert any(scheduled(program).buckets for program in programs)
    expected = _train(alone(graph, values), inputs, 0.1)
    for result in run_ranks(_train_all, 4, programs, values, inputs):
        for seen in result:
            torch.testing.assert_close(
                torch.tensor(seen), torch.tensor(expected), rtol=1e-7, atol=0
            )


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("most", [0.01, 1e3])
def test_clipping_is_that_of_torch(kind: float, most: float) -> None:
    module = alone(mlp(), random_values(mlp()))
    module(*random_inputs(mlp()))[module.loss_index].backward()
    given = [p.grad for p in module.parameters() if p.grad is not None]
    copies = [torch.zeros_like(gradient).requires_grad_() for gradient in given]
    for copy, gradient in zip(copies, given, strict=True):
        copy.grad = gradient.clone()
    wanted = torch.nn.utils.clip_grad_norm_(copies, most, kind)
    torch.testing.assert_close(module.clip_grad_norm_(most, kind), wanted)
    torch.testing.assert_close(
        [p.grad for p in module.parameters() if p.grad is not None], [copy.grad for copy in copies]
    )


def _no_sync_is_silent(
    program: Program, values: dict[str, Tensor], inputs: list[Tensor]
) -> tuple[int, int]:
    module = ParallelModule(program, DeviceGroups.create(program.assignment.mesh), values)
    with CollectiveLog() as quiet, module.no_sync():
        module(*inputs)[module.loss_index].backward()
    with CollectiveLog() as loud:
        module(*inputs)[module.loss_index].backward()
    return len(quiet.issued), len(loud.issued)


def test_gradients_are_brought_home_once() -> None:
    graph = mlp()
    mesh = mesh_of((2,))
    program = next(
        p
        for p in (random_program(graph, mesh, seed) for seed in range(200))
        if scheduled(p).buckets
    )
    plan = scheduled(program)
    extra = sum(
        1
        for unit in plan.units
        for issued in reduce_rounds(program, plan.chains.reduction(unit.number, last=True), Types())
        for _ in issued
    )
    assert extra >= sum(len(bucket.sums) for bucket in scheduled(program).buckets) > 0
    for quiet, loud in run_ranks(
        _no_sync_is_silent, 2, program, random_values(graph), random_inputs(graph)
    ):
        assert loud - quiet == extra


def _states(save: Program, load: Program, folder: str, values: dict[str, Tensor]) -> list[str]:
    """Save under one plan, load under another; the keys of the state dict."""
    groups = DeviceGroups.create(save.assignment.mesh)
    first = ParallelModule(save, groups, values, aliases={"tied.name": "down.weight"})
    assert first.get_parameter("tied.name") is first.get_parameter("down.weight")
    dcp.save({"model": get_model_state_dict(first)}, checkpoint_id=folder)
    zeros = {name: torch.zeros_like(value) for name, value in values.items()}
    second = ParallelModule(load, groups, zeros, aliases={"tied.name": "down.weight"})
    state = {"model": get_model_state_dict(second)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(second, state["model"])
    for name, parameter in second.graph_parameters().items():
        assert torch.equal(second.full_value(name, parameter), values[name]), name
        assert isinstance(parameter, DTensor) and torch.equal(
            parameter.full_tensor(), values[name]
        ), name
    second.load_state_dict(first.state_dict() if save is load else second.state_dict())
    return list(second.state_dict())


def test_checkpoint_between_plans() -> None:
    """A distributed checkpoint is resharded from one plan's storage to another's."""
    graph = mlp()
    save, load = (random_program(graph, mesh_of((2, 2)), seed) for seed in (1, 2))
    assert save.assignment.storage != load.assignment.storage
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(
            _states, 4, save, load, str(Path(folder, "state")), random_values(graph)
        )
    assert set(results[0]) == {tensor.name for tensor in graph.parameters} | {"tied.name"}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "none"])
def test_compare(optimizer: str) -> None:
    graph = GRAPHS["embedding"]()
    program = random_program(graph, mesh_of((2,)), 3)
    report = compare(
        program, random_values(graph), random_inputs(graph), optimizer=optimizer, steps=2
    )
    assert report.passed, report
    kinds = {entry.what for entry in report.entries}
    assert kinds == {"output", "loss", "gradient"} | ({"weight"} if optimizer != "none" else set())
    assert str(report).startswith("equal to one device: ")


def _refusals(program: Program, values: dict[str, Tensor], graph: Graph) -> list[str]:
    groups = DeviceGroups.create(program.assignment.mesh)
    module = ParallelModule(
        program, groups, {name: (lambda value=value: value) for name, value in values.items()}
    )
    x = random_inputs(graph)[0]
    messages = []
    for attempt in (
        lambda: ParallelModule(program, groups, {**values, "up.bias": torch.zeros(3)}),
        lambda: ParallelModule(
            program, groups, {k: v for k, v in values.items() if k != "up.bias"}
        ),
        lambda: module(x[:1]),
        lambda: module(x.float()),
        lambda: module(x, x),
        lambda: module(y=x),
        lambda: DeviceGroups.create(mesh_of((3,))),
    ):
        with pytest.raises(PlanError) as caught:
            attempt()
        messages.append(str(caught.value))
    assert torch.equal(module(x=x)[0], module(x)[0])
    dist.barrier()
    return messages


def test_what_does_not_match_is_refused() -> None:
    graph = mlp()
    messages = run_ranks(
        _refusals, 2, random_program(graph, mesh_of((2,)), 0), random_values(graph), graph
    )[0]
    expected = [
        "'up.bias' is",
        "no values are given for up.bias",
        *["input 'x' is"] * 2,
        *["takes the inputs x"] * 2,
        "3 devices",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message
