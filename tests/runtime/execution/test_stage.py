"""Segments that are made again, and micro-batches, on one device: the same gradients, fewer bytes
kept, shared programs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.frontends.load import ModelOptions, load_model
from autopar.order.execution import Chunk, Execution, execution
from autopar.order.scheduled import scheduled
from autopar.runtime.checking.check import one_device
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.program import Assignment, Decision
from autopar.sharding.rules import tensors_with_gradient
from autopar.sharding.schedule import Schedule
from tests.runtime.graphs import mlp
from tests.runtime.helpers import alone, random_inputs, random_values


class _Net(nn.Module):
    """Layers with dropout (or none), one value read by two of them, another hidden where an input
    is negative, and their loss.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 3)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        one = torch.tanh(self.first(x))
        two = self.drop(torch.tanh(self.second(one)))
        out: Tensor = self.third(one + two * (x[:, :1] > 0)).square().mean()
        return out


def _net(rate: float = 0.0) -> tuple[nn.Module, Analysis, Tensor]:
    torch.manual_seed(0)
    module = _Net(rate).train()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return module, analyse(load_model(module, ModelOptions(train=True), (x,)).graph, train=True), x


def _parallel(module: nn.Module, analysis: Analysis, schedule: Schedule) -> ParallelModule:
    """The model on one device under a schedule."""
    plain = one_device(analysis.graph, analysis.gradients).assignment
    offers = analysis.offers
    decisions = {
        name: Decision(
            options=(),
            rule=offers[name].rule if name in offers else None,
            inputs=d.inputs,
            outputs=d.outputs,
        )
        for name, d in plain.decisions.items()
    }
    assignment = Assignment(
        mesh=plain.mesh,
        decisions=decisions,
        storage=plain.storage,
        outputs=plain.outputs,
        chains={},
        gradients=analysis.gradients,
    )
    values: dict[str, Tensor] = dict(module.named_parameters())
    return ParallelModule(
        execution(assignment, analysis, schedule),
        DeviceGroups.single(),
        values,
        options=ModuleOptions(exact_random=True),
    )


def _middle(analysis: Analysis) -> tuple[tuple[str, ...], ...]:
    names = [op.name for op in analysis.warm]
    return (tuple(names[1:6]),)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_the_original(rate: float, count: int, again: bool) -> None:
    module, analysis, x = _net(rate)
    ours = _parallel(
        module,
        analysis,
        Schedule(micro_batches=count, recompute=_middle(analysis) if again else ()),
    )
    torch.manual_seed(5)
    loss = ours.loss(x)
    loss.backward()  # type: ignore[no-untyped-call]
    after = torch.rand(1)
    torch.manual_seed(5)
    module(x).backward()
    assert torch.equal(after, torch.rand(1)), "as many random numbers are drawn as by one device"
    for (name, mine), theirs in zip(
        ours.graph_parameters().items(), module.parameters(), strict=True
    ):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7), name


def test_fewer_bytes_are_kept() -> None:
    module, analysis, x = _net()
    kept = {}
    for again in (False, True):
        ours = _parallel(module, analysis, Schedule(recompute=_middle(analysis) if again else ()))
        storages: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in ours.parameters()}

        def pack(value: Tensor, storages: dict[int, int] = storages, own: set[int] = own) -> Tensor:
            if value.untyped_storage().data_ptr() not in own:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with saved_tensors_hooks(pack, lambda value: value):
            loss = ours.loss(x)
        kept[again] = sum(storages.values())
        del loss
    assert kept[True] < 0.8 * kept[False]


def test_equal_micro_batches_share_a_program() -> None:
    for rate, programs in ((0.0, 1), (0.5, 4)):
        module, analysis, x = _net(rate)
        ours = _parallel(module, analysis, Schedule(micro_batches=4))
        ours.loss(x)
        (stage,) = ours.engine.stages.values()
        assert len({id(stage.program(index)) for index in range(4)}) == programs


def test_nothing_is_changed_before_the_loss_is_asked_for_its_gradient() -> None:
    module, analysis, x = _net()
    ours = _parallel(module, analysis, Schedule(micro_batches=2))
    loss = ours.loss(x)
    assert all(p.grad is None for p in ours.parameters())
    with torch.no_grad():
        assert ours.loss(x) == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_broken_step_leaves_nothing_behind(
    count: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of before stay, and the next step is right."""
    module, analysis, x = _net()
    ours = _parallel(
        module,
        analysis,
        Schedule(micro_batches=count, recompute=_middle(analysis) if again else ()),
    )
    (stage,) = ours.engine.stages.values()

    def fail(*_: Tensor) -> tuple[Tensor, ...]:
        raise ValueError("broken")

    for parameter in ours.parameters():
        parameter.grad = torch.ones_like(parameter)
    with monkeypatch.context() as patch:
        patch.setattr(stage.first.segments[-1].module, "forward", fail)
        with pytest.raises(ValueError, match="broken"):
            ours.loss(x)
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in ours.parameters())
    ours.zero_grad()
    ours.loss(x).backward()  # type: ignore[no-untyped-call]
    module(x).backward()
    for mine, theirs in zip(ours.graph_parameters().values(), module.parameters(), strict=True):
        assert (
            mine.grad is not None
            and theirs.grad is not None
            and torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        )


def test_what_the_last_segment_reads_and_gives_leaves_the_stage() -> None:
    graph = mlp()
    values = random_values(graph)
    (x,) = random_inputs(graph)
    wanted = alone(graph, values).local_outputs(x)
    names = [op.name for op in graph.operators]
    program = one_device(graph, tensors_with_gradient(graph, train=True))
    plan = scheduled(program, Schedule(recompute=(tuple(names[:-1]),)))
    assert len(plan.segments) == 2
    ours = ParallelModule(
        Execution(chunks=(Chunk(whole=plan, micro=plan, split=None),)),
        DeviceGroups.single(),
        values,
    )
    actual = ours.local_outputs(x)
    torch.testing.assert_close(actual, wanted)
    sum(value.sum() for value in actual).backward()
    assert all(p.grad is not None for p in ours.parameters())
