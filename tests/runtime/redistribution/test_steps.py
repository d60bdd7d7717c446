"""Every step over one axis or several, and random chains, on real ranks, against the definition of
the kinds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.costmodel import load_cluster
from autopar.costmodel.step.covered import Seconds
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.timeline import step_timeline
from autopar.frontends.load import ModelOptions, load_model
from autopar.order.execution import Execution, execution
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.redistribution.steps import (
    apply_chain,
    arrive,
    depart,
    gather_full,
    step_actions,
)
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import (
    B,
    Layout,
    Placement,
    R,
    S,
    format_layout,
    is_valid,
    parse_layout,
)
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Redistribute
from autopar.sharding.redistribution import changed_axes, is_step, steps_from
from autopar.sharding.schedule import PLAIN
from tests.runtime.helpers import mesh_of
from tests.runtime.kinds import all_kinds, assemble, pieces
from tests.runtime.nets import on_this_rank, whole_gradients
from tests.sharding.direct_assignment import pinned_assignment

pytestmark = pytest.mark.usefixtures("strict_collectives")

Case = tuple[tuple[int, ...], tuple[Layout, ...]]
SHAPE = (8, 12, 16)
LARGE = (8, 24, 32)


def run_cases(mesh: tuple[int, ...], cases: list[Case]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's value after each chain, and gradient before it."""
    groups = DeviceGroups.create(mesh_of(mesh))
    rank = dist.get_rank()
    out = []
    for seed, (shape, chain) in enumerate(cases):
        value, gradient = wholes(shape, seed)
        # Non-contiguous on purpose: a step must not care how its input lies in memory.
        local = pieces(value, chain[0], mesh, gradient=False, seed=seed)[rank]
        local = local.movedim(0, -1).contiguous().movedim(-1, 0).detach().requires_grad_()
        after = apply_chain(local, chain, groups, gradient=True)
        beside = local.detach().requires_grad_()
        on_its_way = departing(beside, chain, groups)
        assert torch.equal(on_its_way, after)
        assert after.is_contiguous() or len(chain) == 1 or after.stride() == local.stride()
        after.backward(
            pieces(gradient, chain[-1], mesh, gradient=True, seed=seed)[rank].contiguous()
        )
        on_its_way.backward(
            pieces(gradient, chain[-1], mesh, gradient=True, seed=seed)[rank].contiguous()
        )
        assert (
            local.grad is not None
            and beside.grad is not None
            and torch.equal(beside.grad, local.grad)
        )
        out.append((after.detach(), local.grad))
    return out


def departing(value: torch.Tensor, chain: Sequence[Layout], groups: DeviceGroups) -> torch.Tensor:
    """The same as `apply_chain`, each step in two."""
    for before, after in itertools.pairwise(chain):
        group = groups.over(changed_axes(before, after))
        ahead, back = step_actions(before, after, groups.mesh.shape)
        value = arrive(depart(value, ahead, back, group), ahead, back, group)
    return value


def wholes(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.rand(shape, dtype=torch.float64, generator=generator), torch.rand(
        shape, dtype=torch.float64, generator=generator
    )


def check(mesh: tuple[int, ...], cases: list[Case]) -> None:
    ranks = 1
    for size in mesh:
        ranks *= size
    results = run_ranks(run_cases, ranks, mesh, cases)
    for seed, (shape, chain) in enumerate(cases):
        text = " -> ".join(map(format_layout, chain))
        value, gradient = wholes(shape, seed)
        got = assemble(
            [result[seed][0] for result in results], chain[-1], mesh, shape, gradient=False
        )
        torch.testing.assert_close(got, value, msg=lambda m, text=text: f"value of {text}: {m}")
        back = assemble(
            [result[seed][1] for result in results], chain[0], mesh, shape, gradient=True
        )
        torch.testing.assert_close(
            back, gradient, msg=lambda m, text=text: f"gradient of {text}: {m}"
        )


@pytest.mark.parametrize("degree", [2, 4])
def test_single_axis_steps(degree: int) -> None:
    """All pairs of kinds, with splits of the first, a middle and the last dim, whole and within
    parts.
    """
    kinds = all_kinds({0: (1,), 1: (1, 3), 2: (1, 2)})
    pairs = [((b,), (a,)) for b, a in itertools.product(kinds, kinds) if is_step((b,), (a,))]
    assert len(pairs) > 40
    check((degree,), [(SHAPE, pair) for pair in pairs])


@pytest.mark.parametrize(("mesh", "axes"), [((2, 4), (0, 1)), ((2, 2, 2), (0, 2))])
def test_steps_over_several_axes(mesh: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """All pairs of kinds, alike on the axes.

    Whatever lies on an axis between or beside them stays.
    """
    kinds = all_kinds({0: (1,), 1: (1, 3)})
    beside: list[Placement] = [R] if len(axes) == len(mesh) else [B, S(0), S(2, 8)]
    cases: list[Case] = []
    for other, before, after in itertools.product(beside, kinds, kinds):
        pair = tuple(
            tuple(kind if axis in axes else other for axis in range(len(mesh)))
            for kind in (before, after)
        )
        if is_step(*pair) and all(is_valid(layout, LARGE, mesh) for layout in pair):
            cases.append((LARGE, pair))
    assert len(cases) > 20
    check(mesh, cases)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 2, 2)])
def test_random_chains(mesh: tuple[int, ...]) -> None:
    """Random walks over layouts of several axes, with splits that nest and splits within parts."""
    rng = random.Random(7)
    shape = (8, 24, 16)
    kinds = all_kinds({0: (1,), 1: (1, 3, 6), 2: (1, 2)})
    starts = [
        layout
        for layout in itertools.product(kinds, repeat=len(mesh))
        if is_valid(layout, shape, mesh)
    ]
    cases: list[Case] = []
    for _ in range(40):
        chain = [rng.choice(starts)]
        for _ in range(rng.randint(1, 5)):
            chain.append(
                rng.choice([after for _, after in steps_from(chain[-1], kinds, shape, mesh)])
            )
        cases.append((shape, tuple(chain)))
    check(mesh, cases)


def _other_dtypes() -> None:
    groups = DeviceGroups.create(mesh_of((2,)))
    split, other, partial, whole = (parse_layout(text) for text in ("S0", "S1/2", "P", "R"))
    whole_value = torch.arange(32).reshape(4, 8) % 5
    dtypes = (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
    for dtype in (*dtypes, torch.complex64, torch.float8_e4m3fn):
        value = whole_value.to(dtype)
        local = shard_of(value, cuts_of(split, (2,), groups.coordinate))
        moved = apply_chain(local, (split, other), groups, gradient=False)
        assert (
            departing(local, (split, other), groups)
            .view(-1)
            .view(torch.uint8)
            .equal(moved.view(-1).view(torch.uint8))
        ), dtype
        assert torch.equal(
            moved.cpu().float(), shard_of(value, cuts_of(other, (2,), groups.coordinate)).float()
        ), dtype
        assert torch.equal(gather_full(moved, other, groups).float(), value.float()), dtype
        assert moved.dtype == dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32):
        summed = apply_chain(
            torch.full((4, 8), groups.rank + 1).to(dtype), (partial, whole), groups, gradient=False
        )
        assert torch.equal(summed.float(), torch.full((4, 8), 3.0)), dtype
        mine = apply_chain(
            torch.full((4, 8), groups.rank + 1).to(dtype), (partial, split), groups, gradient=False
        )
        assert torch.equal(mine.float(), torch.full((2, 8), 3.0)), dtype


def test_other_dtypes() -> None:
    """Integers, booleans, half precision, complex and fp8 move and (where they can) add up."""
    run_ranks(_other_dtypes, 2)


def _maximum() -> float:
    groups = DeviceGroups.create(mesh_of((2,)))
    return float(
        apply_chain(
            torch.tensor([1.0 + groups.rank]),
            (parse_layout("P(max)"), parse_layout("R")),
            groups,
            gradient=False,
        )
    )


def test_partial_maximum() -> None:
    assert run_ranks(_maximum, 2) == [2.0, 2.0]


# --- beside computation ---


class _Two(nn.Module):
    """Two projections of the same rows, whose results are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        made = self.one(x) * self.two(x)
        result: torch.Tensor = (made.square() + made).mean()
        return result


def _two() -> tuple[_Two, Analysis, torch.Tensor]:
    """The network, and what its plans choose from."""
    torch.manual_seed(0)
    module = _Two().double()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return module, analyse(load_model(module, ModelOptions(train=True), (x,)).graph, train=True), x


def _exchanged(analysis: Analysis) -> Execution:
    """Rows of both projections over the ranks, and columns of what is made of them: two all-to-alls
    between.
    """
    wanted = {op.name: [R] for op in analysis.warm}
    wanted |= {op.name: [S(0)] for op in analysis.warm if "linear" in op.kind}
    wanted |= {name: [S(1)] for name in ("mul", "square", "add") if name in wanted}
    return execution(pinned_assignment(analysis, mesh_of((2,)), wanted), analysis, PLAIN)


def test_a_redistribution_stands_behind_what_makes_its_value() -> None:
    plan = _exchanged(_two()[1]).whole
    steps = [plan.program.steps[index] for segment in plan.segments for index in segment.steps]
    names = [
        f"exchange {s.tensor}" if isinstance(s, Redistribute) else s.operator.name for s in steps
    ]
    first = names.index("one/linear")
    assert names[first : first + 5] == [
        "one/linear",
        "exchange one/linear:0",
        "two/linear",
        "exchange two/linear:0",
        "mul",
    ]


class _Sequence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The products, and what collectives do, in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        names = {
            "addmm": "product",
            "mm": "product",
            "linear": "product",
            "all_to_all_single": "begins",
            "wait_tensor": "ends",
        }
        if name in names:
            self.names.append(names[name])
        return func(*args, **(kwargs or {}))


def _watched(
    execution: Execution, anomaly: bool
) -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    module, _, x = _two()
    parallel = on_this_rank(execution, module)
    with torch.autograd.set_detect_anomaly(anomaly):
        with _Sequence() as ahead:
            loss = parallel.loss(x)
        with _Sequence() as back:
            loss.backward()
    return (
        ahead.names,
        back.names,
        {name: g for name, g in whole_gradients(parallel).items() if g is not None},
    )


@pytest.mark.parametrize("anomaly", [False, True])
def test_collectives_run_beside_products(anomaly: bool) -> None:
    """The second projection runs while the first is exchanged; backward, the gradients of both are
    exchanged together.
    """
    module, analysis, x = _two()
    module(x).backward()
    for ahead, back, gradients in run_ranks(_watched, 2, _exchanged(analysis), anomaly):
        step = ahead[ahead.index("product") :]  # behind the agreement on the batch
        assert step[:6] == ["product", "begins", "product", "begins", "ends", "ends"]
        assert (
            back[:6]
            == [
                "begins",
                *["ends"] * anomaly,
                "begins",
                *["ends"] * anomaly,
                "ends",
                "product",
                "ends",
                "product",
            ][:6]
        )
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


def test_what_runs_beside_products_is_priced_so() -> None:
    """With products as long as exchanges the first exchange costs nothing, forward and backward."""
    _, analysis, _ = _two()
    plan = _exchanged(analysis)
    mesh = Mesh(axes=(Axis(name="x", size=2, level="loopback"),))
    prices = MeshPrices(cluster=load_cluster("local-cpu").sized(2), mesh=mesh)
    exchange = prices.seconds("all_to_all", (0,), 4 * 8 * 8 // 2)
    times = Seconds(forward=exchange, backward=exchange)
    timed = step_timeline(
        plan.whole,
        prices,
        lambda step: times if "linear" in step.operator.kind else Seconds(0.0, 0.0),
    )
    assert timed.hidden == pytest.approx(2 * exchange, rel=1e-6)
