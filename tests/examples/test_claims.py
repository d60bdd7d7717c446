"""Claims of the documents on primitives, modes and formulas, as far as no other test shows them
already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.costmodel.collectives.bus_bandwidth import bus_factor
from autopar.integrations import communication as comm
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from tests.costmodel.collectives.schedules.algorithms import build, seconds
from tests.costmodel.collectives.schedules.simulator import Link


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    autopar.reset_auto_parallel_context()
    yield
    autopar.reset_auto_parallel_context()


A = 3e-6
B = 1e-9
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
        (
            "all_gather",
            "binomial_tree",
            lambda p, log: A * log + (p - 1) * B * LENGTH + (A + B * p * LENGTH) * log,
        ),
    ],
)
@pytest.mark.parametrize("log", [1, 2, 4])
def test_formulas_of_the_textbook(
    kind: str, algorithm: str, wanted: Callable[[int, int], float], log: int
) -> None:
    """Its l is what each device has of a gather or a scatter: p times as much in all.
    Reduce-then-broadcast is twice what it says.

    The last all-gather is a gather and a broadcast of all that has been gathered.
    """
    p = 2**log
    nbytes = LENGTH * p if kind in ("gather", "scatter", "all_gather") else LENGTH
    assert seconds(kind, algorithm, nbytes, (p,), LINE) == pytest.approx(wanted(p, log), rel=1e-9)


def test_factors_from_algorithm_to_bus_bandwidth() -> None:
    for p in (2, 3, 8, 64):
        assert bus_factor("all_reduce", p) == pytest.approx(2 * (p - 1) / p)
        assert (
            bus_factor("reduce_scatter", p)
            == bus_factor("all_gather", p)
            == pytest.approx((p - 1) / p)
        )
        assert bus_factor("broadcast", p) == bus_factor("reduce", p) == 1
        assert (
            bus_factor("gather", p) == bus_factor("scatter", p) == pytest.approx((p - 1) / p)
        )  # as NCCL's tests have them


def test_a_ring_is_a_reduce_scatter_and_an_all_gather() -> None:
    for p in (2, 3, 8):
        parts = sum(
            seconds(kind, "ring", LENGTH, (p,), LINE) for kind in ("reduce_scatter", "all_gather")
        )
        assert seconds("all_reduce", "ring", LENGTH, (p,), LINE) == pytest.approx(parts)
        assert len(build("all_reduce", "ring", p).rounds) == 2 * (p - 1)  # N - 1 times each
        slowest = (Link(latency=0, rate=0.5e9),)
        assert seconds("all_reduce", "ring", LENGTH, (p,), slowest) == pytest.approx(
            2 * (p - 1) / p * LENGTH / 0.5e9
        )


@pytest.mark.parametrize("p", [3, 8])
def test_every_device_has_the_same_share_of_a_ring(p: int) -> None:
    """M - 1 reductions and M - 1 broadcasts of N / M: in each all send and receive at once, and all
    add up as much.
    """
    rounds = build("all_reduce", "ring", p).rounds
    assert len(rounds) == 2 * (p - 1)
    for number, messages in enumerate(rounds):
        assert (
            sorted(m.source for m in messages)
            == sorted(m.destination for m in messages)
            == list(range(p))
        )
        assert all(len(m.chunks) == 1 and m.reduce == (number < p - 1) for m in messages)
        assert {(m.destination - m.source) % p for m in messages} in (
            {1},
            {p - 1},
        )  # to one neighbour, from the other


def test_a_large_ring_is_slow_to_go_round_and_best_for_large_messages() -> None:
    """Its steps grow with the number of devices, those of a tree with its logarithm; its bytes do
    not, those of a tree do.
    """
    for p, nbytes, best in ((64, 1e3, "binomial_tree"), (64, 1e9, "ring"), (8, 1e9, "ring")):
        other = {"ring": "binomial_tree", "binomial_tree": "ring"}[best]
        assert seconds("all_reduce", best, nbytes, (p,), LINE) < seconds(
            "all_reduce", other, nbytes, (p,), LINE
        )
    assert seconds("all_reduce", "ring", 1e9, (8,), LINE) < sum(
        seconds(kind, "binomial_tree", 1e9, (8,), LINE) for kind in ("reduce", "broadcast")
    )


def _examples() -> list[Any]:
    """The worked examples of the documents, on four ranks."""
    me = comm.get_rank()
    column = torch.arange(4.0).view(4, 1)  # every card holds a 4x1 tensor
    given = torch.tensor([[2.0, 4, 6], [1, 2, 3], [4, 8, 12], [0, 0, 0]])[me]
    summed = comm.all_reduce(given)
    picture = torch.tensor([[1.0, 2, 3], [1, 2, 3]])
    return [
        comm.reduce_scatter(column).tolist(),
        summed.tolist(),
        (summed / 3).tolist(),
        comm.all_reduce(picture).tolist(),
        comm.broadcast(torch.full((1, 3), float(me))).tolist(),
    ]


def test_worked_examples() -> None:
    for me, actual in enumerate(run_ranks(_examples, 4, timeout=60)):
        assert actual[0] == [[4.0 * me]]
        assert actual[1] == [7.0, 14.0, 21.0] and actual[2] == pytest.approx([7 / 3, 14 / 3, 7.0])
        assert actual[3] == [[4.0, 8.0, 12.0]] * 2 and actual[4] == [[0.0] * 3]


def _compositions() -> bool:
    """Primitives that are compositions of others, and pairs that undo each other."""
    me = comm.get_rank()
    own = torch.randn(4, 3, generator=torch.Generator().manual_seed(comm.get_rank()))
    reduced = comm.reduce(own)
    parts = comm.reduce_scatter(own)
    by_root = comm.broadcast(reduced if reduced is not None else torch.zeros_like(own))
    whole = comm.gather(own)
    spread = comm.broadcast(whole if whole is not None else torch.zeros(8, 3))
    back = comm.scatter(whole if whole is not None else torch.zeros(8, 3))
    twice = comm.all_to_all(comm.all_to_all(own))
    every = comm.all_reduce(own)
    return all(
        torch.allclose(a, b)
        for a, b in (
            (by_root, every),
            (comm.all_gather(parts), every),
            (spread, comm.all_gather(own)),
            (back, own),
            (twice, own),
            (parts, every.chunk(2)[me]),
        )
    )


def test_primitives_are_made_of_one_another() -> None:
    assert all(run_ranks(_compositions, 2, timeout=60))


def _others() -> bool:
    """Operations without a primitive of their own: prefix sums, a logical or, signal and wait, a
    parallel sort.
    """
    me = comm.get_rank()
    size = comm.get_group_size()
    numbers = [
        torch.randn(5, generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]
    prefix = comm.all_gather(numbers[me].view(1, -1)).cumsum(0)[me]
    either = comm.all_reduce((numbers[me] > 1).int(), "max").bool()
    if me == 0:
        comm.send(torch.empty(0), 1)  # a signal
    elif me == 1:
        comm.recv(torch.empty(0), 0)  # and the wait for it
    runs = comm.gather(numbers[me].sort().values)
    held = torch.stack(numbers)
    sorted_ = runs is None or torch.equal(runs.sort().values, held.flatten().sort().values)
    return (
        torch.allclose(prefix, held[: me + 1].sum(0))
        and torch.equal(either, (held > 1).any(0))
        and sorted_
    )


def test_what_else_the_primitives_make() -> None:
    assert all(run_ranks(_others, 3, timeout=60))


def _slowest() -> float:
    waits: list[Callable[[], object]] = [comm.barrier, lambda: comm.all_reduce(torch.ones(4))]
    shortest = 9.0
    for wait in waits:
        comm.all_reduce(torch.ones(1))
        start = time.monotonic()
        if comm.get_rank() == 1:
            time.sleep(0.6)
        wait()
        shortest = min(shortest, time.monotonic() - start)
    return shortest


def test_all_wait_for_the_slowest() -> None:
    assert min(run_ranks(_slowest, 3, timeout=60)) > 0.1


class ToyModel(nn.Module):
    """The model of the textbook's example."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.net2(torch.relu(self.net1(x))), y)


def _toy() -> ToyModel:
    torch.manual_seed(0)
    return ToyModel().double()


X, Y = torch.randn(20, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).split(
    (10, 5), 1
)


def test_data_parallelism_is_torchs_distributed_data_parallel() -> None:
    autopar.set_auto_parallel_context(
        parallel_mode="data_parallel", device_num=2, gradients_mean=True
    )
    plan = autopar.plan(_toy(), (X, Y), cluster="local-cpu", optimizer="sgd")

    def work() -> float:
        x = X.chunk(2)[dist.get_rank()]
        y = Y.chunk(2)[dist.get_rank()]
        theirs = nn.parallel.DistributedDataParallel(_toy())
        ours = autopar.parallelize(_toy(), plan)
        for module in (theirs, ours):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                (module(x, y) if module is theirs else ours.loss(x, y)).backward()
                optimizer.step()
        return max(
            float((a - b).abs().max())
            for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)
        )

    assert max(run_ranks(work, 2, timeout=60)) < 1e-12


@pytest.mark.parametrize(
    ("width", "batch", "factors", "storage"),
    [(1024, 2**18, ({"d0"}, {"d0"}), {"R"}), (32768, 64, ({"n"}, {"k"}), {"S0", "S1"})],
)
def test_small_models_split_their_data_and_large_ones_themselves(
    width: int, batch: int, factors: tuple[set[str], ...], storage: set[str]
) -> None:
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False)
        )
        x = torch.empty(batch, width)
    plan = autopar.plan(
        net,
        (x,),
        devices=8,
        cluster="dgx-a100-80g",
        optimizer="sgd",
        mesh=(8,),
        micro_batches=1,
        stages=1,
    )
    assert tuple(set(plan.operators[f"{n}/linear"].strategy) for n in (0, 2)) == factors
    assert {p.storage for p in plan.parameters.values()} == storage


def test_the_mul_of_mindspore_is_cut_in_two() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mul = autopar.shard(torch.mul, ((2, 1), (2, 1)))
            self.y = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.mul(x, self.y)
            return output

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
    kinds = [collective.kind for _, collective in log.issued]
    return [
        torch.equal(c.to_local(), own),
        torch.allclose(joined, a.full() @ b.full()),
        kinds == ["all_gather"],
    ]


def test_columns_over_devices_are_joined_by_an_all_gather() -> None:
    assert run_ranks(_columns, 2, timeout=60) == [[True] * 3] * 2


def test_zero_gathers_weights_and_scatters_gradients() -> None:
    """Weights are stored in parts, gathered for each pass; a rank gets the gradient of its part."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    x = torch.randn(4, 1024)
    plan = autopar.plan(
        model, (x,), devices=2, cluster="local-cpu", mesh=(2,), scheme="zero3", optimizer="sgd"
    )
    assert {"S0", "S1"} >= {
        p.storage for p in plan.parameters.values()
    } and plan.schedule.gathered == "per_pass"
    actual = {(c.phase, c.kind) for c in plan.collectives if c.nbytes > 8}
    assert actual == {
        ("forward", "all_gather"),
        ("backward", "all_gather"),
        ("backward", "reduce_scatter"),
    }
