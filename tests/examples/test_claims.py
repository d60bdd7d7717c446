"""What the documents say of primitives, modes and formulas, as far as no other test shows it already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import communication as comm
from autopar.costmodel.collectives.bandwidth import bus_factor
from autopar.runtime.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from tests.costmodel.schedules.algorithms import build, seconds
from tests.costmodel.schedules.simulator import Link


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    autopar.reset_auto_parallel_context()
    yield
    autopar.reset_auto_parallel_context()


A, B = 3e-6, 1e-9
LENGTH = 1e6
LINE = (Link(latency=A, rate=1 / B),)


@pytest.mark.parametrize(
    ("kind", "algorithm", "wanted"),
    [
        ("broadcast", "linear", lambda p, log: (A + B * LENGTH) * (p - 1)),
        ("broadcast", "binomial_tree", lambda p, log: (A + B * LENGTH) * log),
        ("reduce", "binomial_tree", lambda p, log: (A + B * LENGTH) * log),
        ("all_reduce", "binomial_tree", lambda p, log: 2 * (A + B * LENGTH) * log),
        ("gather", "binomial_tree", lambda p, log: A * log + (p - 1) * B * LENGTH),
        ("scatter", "binomial_tree", lambda p, log: A * log + (p - 1) * B * LENGTH),
        ("all_gather", "recursive_doubling", lambda p, log: A * log + (p - 1) * B * LENGTH),
    ],
)
@pytest.mark.parametrize("log", [1, 2, 4])
def test_formulas_of_the_textbook(kind: str, algorithm: str, wanted: Callable[[int, int], float], log: int) -> None:
    """Its l is what each device has of a gather or a scatter: p times as much in all. Reduce-then-broadcast is twice what it says."""
    p = 2**log
    nbytes = LENGTH * p if kind in ("gather", "scatter", "all_gather") else LENGTH
    assert seconds(kind, algorithm, nbytes, (p,), LINE) == pytest.approx(wanted(p, log), rel=1e-9)


def test_factors_from_algorithm_to_bus_bandwidth() -> None:
    for p in (2, 3, 8, 64):
        assert bus_factor("all_reduce", p) == pytest.approx(2 * (p - 1) / p)
        assert bus_factor("reduce_scatter", p) == bus_factor("all_gather", p) == pytest.approx((p - 1) / p)
        assert bus_factor("broadcast", p) == bus_factor("reduce", p) == 1


def test_a_ring_is_a_reduce_scatter_and_an_all_gather() -> None:
    for p in (2, 3, 8):
        parts = sum(seconds(kind, "ring", LENGTH, (p,), LINE) for kind in ("reduce_scatter", "all_gather"))
        assert seconds("all_reduce", "ring", LENGTH, (p,), LINE) == pytest.approx(parts)
        assert len(build("all_reduce", "ring", p).rounds) == 2 * (p - 1)  # N - 1 times each
        slowest = (Link(latency=0, rate=0.5e9),)
        assert seconds("all_reduce", "ring", LENGTH, (p,), slowest) == pytest.approx(2 * (p - 1) / p * LENGTH / 0.5e9)


def _examples() -> list[Any]:
    """The worked examples of the documents, on four ranks."""
    me = comm.get_rank()
    column = torch.arange(4.0).view(4, 1)  # every card holds a 4x1 tensor
    given = torch.tensor([[2.0, 4, 6], [1, 2, 3], [4, 8, 12], [0, 0, 0]])[me]
    summed = comm.all_reduce(given)
    picture = torch.tensor([[1.0, 2, 3], [1, 2, 3]])
    return [
        comm.reduce_scatter(column).tolist(), summed.tolist(), (summed / 3).tolist(), comm.all_reduce(picture).tolist(),
        comm.broadcast(torch.full((1, 3), float(me))).tolist(),
    ]  # fmt: skip


def test_worked_examples() -> None:
    for me, found in enumerate(run_ranks(_examples, 4, timeout=60)):
        assert found[0] == [[4.0 * me]]
        assert found[1] == [7.0, 14.0, 21.0] and found[2] == pytest.approx([7 / 3, 14 / 3, 7.0])
        assert found[3] == [[4.0, 8.0, 12.0]] * 2 and found[4] == [[0.0] * 3]


def _compositions() -> bool:
    """Primitives that are compositions of others, and pairs that undo each other."""
    me, own = comm.get_rank(), torch.randn(4, 3, generator=torch.Generator().manual_seed(comm.get_rank()))
    reduced, parts = comm.reduce(own), comm.reduce_scatter(own)
    by_root = comm.broadcast(reduced if reduced is not None else torch.zeros_like(own))
    whole = comm.gather(own)
    spread = comm.broadcast(whole if whole is not None else torch.zeros(8, 3))
    back = comm.scatter(whole if whole is not None else torch.zeros(8, 3))
    twice = comm.all_to_all(comm.all_to_all(own))
    every = comm.all_reduce(own)
    return all(
        torch.allclose(a, b)
        for a, b in (
            (by_root, every), (comm.all_gather(parts), every), (spread, comm.all_gather(own)), (back, own), (twice, own),
            (parts, every.chunk(2)[me]),
        )
    )  # fmt: skip


def test_primitives_are_made_of_one_another() -> None:
    assert all(run_ranks(_compositions, 2, timeout=60))


class ToyModel(nn.Module):
    """The model of the textbook's example."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.net2(torch.relu(self.net1(x))), y)


def _toy() -> ToyModel:
    torch.manual_seed(0)
    return ToyModel().double()


X, Y = torch.randn(20, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).split((10, 5), 1)


def test_data_parallelism_is_torchs_distributed_data_parallel() -> None:
    autopar.set_auto_parallel_context(parallel_mode="data_parallel", device_num=2, gradients_mean=True)
    plan = autopar.plan(_toy(), (X, Y), cluster="local-cpu", optimizer="sgd")

    def work() -> float:
        x, y = X.chunk(2)[dist.get_rank()], Y.chunk(2)[dist.get_rank()]
        theirs = nn.parallel.DistributedDataParallel(_toy())
        ours = autopar.parallelize(_toy(), plan)
        for module in (theirs, ours):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                (module(x, y) if module is theirs else ours.loss(x, y)).backward()
                optimizer.step()
        return max(float((a - b).abs().max()) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))

    assert max(run_ranks(work, 2, timeout=60)) < 1e-12


def test_the_mul_of_mindspore_is_cut_in_two() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mul, self.y = autopar.shard(torch.mul, ((2, 1), (2, 1))), nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.mul(x, self.y)
            return found

    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2)
    plan = autopar.plan(Net(), (torch.ones(4, 4),), cluster="local-cpu", mode="infer")
    assert dict(plan.operators["mul/mul"].inputs) == {"x": "S0", "y": "S0"}


def _columns() -> list[bool]:
    """C = A B with B's columns over the devices: each has A B_i, and the columns joined are C."""
    place = autopar.placement("cpu", [0, 1])
    a = autopar.randn(4, 6, placement=place, sbp=autopar.sbp.broadcast)
    b = autopar.randn(6, 8, placement=place, sbp=autopar.sbp.split(1))
    c = a @ b
    own = a.to_local() @ b.to_local()
    with CollectiveLog() as log:
        joined = c.to_global(sbp=autopar.sbp.broadcast).to_local()
    kinds = [found.kind for _, found in log.issued]
    return [torch.equal(c.to_local(), own), torch.allclose(joined, a.full() @ b.full()), kinds == ["all_gather"]]


def test_columns_over_devices_are_joined_by_an_all_gather() -> None:
    assert run_ranks(_columns, 2, timeout=60) == [[True] * 3] * 2


def test_zero_gathers_weights_and_scatters_gradients() -> None:
    """Weights are stored in parts, gathered for each pass; a rank gets the gradient of its part."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    x = torch.randn(4, 1024)
    plan = autopar.plan(model, (x,), devices=2, cluster="local-cpu", mesh=(2,), scheme="zero3", optimizer="sgd")
    assert {"S0", "S1"} >= {p.storage for p in plan.parameters.values()} and plan.schedule.gathered == "again"
    found = {(c.phase, c.kind) for c in plan.collectives if c.nbytes > 8}
    assert found == {("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")}
