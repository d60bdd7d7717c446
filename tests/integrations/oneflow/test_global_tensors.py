"""Global tensors against one device: fixed programs, random ones, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import autopar
from autopar.errors import AutoparError, RunError, UsageError
from autopar.integrations.oneflow.handing import stand_in
from autopar.integrations.oneflow.tracing import trace
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from tests.integrations.oneflow.programs import RANKS, mismatch, random_program

QUICK = 5
ALL = 500


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    """Import the modules that tracing needs, once for all forked ranks."""
    trace(torch.tanh, [torch.empty(2, device="meta")])


def _check(first: int, count: int) -> list[str]:
    return [
        text for seed in range(first, first + count) if (text := mismatch(random_program(seed)))
    ]


def test_some_random_programs_equal_one_device() -> None:
    assert run_ranks(_check, RANKS, 0, QUICK, timeout=120) == [[]] * RANKS


@pytest.mark.slow
@pytest.mark.ci
def test_five_hundred_random_programs_equal_one_device() -> None:
    assert run_ranks(_check, RANKS, 1000, ALL, timeout=900) == [[]] * RANKS


def _data() -> list[Any]:
    place = autopar.placement(type="cpu", ranks=[0, 1])
    torch.manual_seed(dist.get_rank())  # rank 0's generator is the one that counts
    x = autopar.randn(4, 5, placement=place, sbp=autopar.sbp.split(dim=0))
    w = autopar.randn(5, 8, placement=place, sbp=autopar.sbp.broadcast, requires_grad=True)
    out = autopar.matmul(x, w)
    out.sum().backward()
    assert out.sbp == (autopar.sbp.split(0),) and out.to_local().shape == (2, 8)
    wanted = x.full() @ w.full()
    return [
        tuple(out.shape),
        torch.allclose(out.full(), wanted),
        torch.allclose(w.grad.full(), x.full().sum(0)[:, None].expand(5, 8)),
    ]


def _model() -> list[Any]:
    place = autopar.placement(type="cpu", ranks=[0, 1])
    x = autopar.randn(4, 5, placement=place, sbp=autopar.sbp.broadcast)
    w = autopar.randn(5, 8, placement=place, sbp=autopar.sbp.split(dim=1), requires_grad=True)
    with CollectiveLog() as log:
        out = autopar.matmul(x, w)
    assert not log.issued and out.sbp == (autopar.sbp.split(1),)
    out.sum().backward()
    assert w.grad.sbp == (autopar.sbp.split(1),)
    return [
        tuple(out.shape),
        torch.allclose(out.full(), x.full() @ w.full()),
        tuple(w.grad.to_local().shape) == (5, 4),
    ]


def _pipeline() -> list[Any]:
    first = autopar.placement(type="cpu", ranks=[0])
    second = autopar.placement(type="cpu", ranks=[1])
    broadcast = autopar.sbp.broadcast
    w0 = autopar.randn(5, 8, placement=first, sbp=broadcast, requires_grad=True)
    w1 = autopar.randn(8, 3, placement=second, sbp=broadcast, requires_grad=True)
    x = autopar.randn(4, 5)
    stage0 = x.to_global(placement=first, sbp=broadcast)
    out0 = autopar.matmul(stage0, w0)
    assert tuple(out0.shape) == (4, 8)
    out1 = autopar.matmul(out0.to_global(placement=second, sbp=broadcast), w1)
    assert out1.to_local().numel() == (12 if dist.get_rank() == 1 else 0)
    out1.square().sum().backward()
    given = stage0.full()
    a = w0.full().requires_grad_()
    b = w1.full().requires_grad_()
    (given @ a @ b).square().sum().backward()
    assert a.grad is not None and b.grad is not None
    return [
        tuple(out1.shape),
        torch.allclose(w0.grad.full(), a.grad, rtol=1e-4),
        torch.allclose(w1.grad.full(), b.grad, rtol=1e-4),
    ]


@pytest.mark.parametrize(
    ("work", "shape"),
    [(_data, (4, 8)), (_model, (4, 8)), (_pipeline, (4, 3))],
    ids=["data", "model", "pipeline"],
)
def test_the_product_of_the_document(work: Callable[[], list[Any]], shape: tuple[int, ...]) -> None:
    assert run_ranks(work, 2, timeout=60) == [[shape, True, True]] * 2


def _two_axes() -> bool:
    """A product split over rows, columns and the dim that is summed at once, on 2 x 2 ranks."""
    place = autopar.placement("cpu", [[0, 1], [2, 3]])
    split = autopar.sbp.split
    broadcast = autopar.sbp.broadcast
    x = autopar.randn(8, 8, placement=place, sbp=(split(0), split(1)), requires_grad=True)
    w = autopar.randn(8, 8, placement=place, sbp=(broadcast, split(0)), requires_grad=True)
    y = x @ w
    assert y.sbp == (split(0), autopar.sbp.partial_sum)
    z = torch.tanh(y)  # not linear: the sum is made
    assert autopar.sbp.partial_sum not in z.sbp
    z.sum().backward()
    a = x.full().requires_grad_()
    b = w.full().requires_grad_()
    torch.tanh(a @ b).sum().backward()
    assert a.grad is not None and b.grad is not None
    return torch.allclose(x.grad.full(), a.grad, atol=1e-5) and torch.allclose(
        w.grad.full(), b.grad, atol=1e-5
    )


def test_two_axes_at_once() -> None:
    assert all(run_ranks(_two_axes, 4, timeout=60))


def _training() -> tuple[bool, bool]:
    """SGD and AdamW of torch on global parameters, in the layouts that these have."""
    place = autopar.placement("cpu", [0, 1])
    results = []
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        w = autopar.randn(4, 6, placement=place, sbp=autopar.sbp.split(1), requires_grad=True)
        b = autopar.zeros(6, placement=place, sbp=autopar.sbp.broadcast, requires_grad=True)
        x = autopar.randn(8, 4, placement=place, sbp=autopar.sbp.split(0))
        plain = [w.full().requires_grad_(), b.full().requires_grad_()]
        ours = kind([w, b], lr=0.1)
        theirs = kind(plain, lr=0.1)
        for _ in range(3):
            for optimizer, (p, q), given in ((ours, (w, b), x), (theirs, plain, x.full())):
                optimizer.zero_grad()
                (F.gelu(given @ p + q)).square().mean().backward()
                optimizer.step()
        results.append(
            all(torch.allclose(p.full(), q, atol=1e-5) for p, q in zip((w, b), plain, strict=True))
        )
        assert w.sbp == (autopar.sbp.split(1),)
    return results[0], results[1]


def test_optimizers_of_torch_train_global_parameters() -> None:
    assert run_ranks(_training, 2, timeout=60) == [(True, True)] * 2


def _dtensors() -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2))
    results = []
    whole = torch.arange(64, dtype=torch.float64).view(8, 8)
    for places in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate())):
        value = distribute_tensor(whole.clone(), mesh, places).requires_grad_()
        ours = autopar.from_dtensor(value)
        assert ours.placement.ranks == [[0, 1], [2, 3]]
        (ours.square().sum() / 2).backward()
        assert value.grad is not None
        results += [torch.equal(ours.full(), whole), torch.equal(value.grad.full_tensor(), whole)]  # type: ignore[attr-defined]
        back = ours.detach().to_dtensor()
        results += [back.placements == places, torch.equal(back.full_tensor(), whole)]
    part = DTensor.from_local(torch.ones(4, 4), mesh, (Partial(), Replicate()))
    results.append(torch.equal(autopar.from_dtensor(part).full(), torch.full((4, 4), 2.0)))
    x = autopar.randn(
        8,
        8,
        placement=autopar.placement("cpu", [[0, 1], [2, 3]]),
        sbp=(autopar.sbp.split(0), autopar.sbp.partial_sum),
    )
    leaf = x.detach().requires_grad_()
    leaf.to_dtensor().redistribute(placements=[Replicate(), Replicate()]).square().sum().backward()
    results.append(torch.allclose(leaf.grad.full(), 2 * x.full()))
    return results


def test_dtensors_both_ways() -> None:
    for rank in run_ranks(_dtensors, 4, timeout=60):
        assert all(rank), rank


def _parts() -> list[Any]:
    """Parts that ranks hold, and their gradients."""
    me = dist.get_rank()
    place = autopar.placement("cpu", [0, 1])
    own = torch.full((2, 3), float(me + 1), requires_grad=True)
    rows = autopar.global_tensor(own, place, autopar.sbp.split(0))
    shares = autopar.global_tensor(own, place, autopar.sbp.partial_sum)
    assert tuple(rows.shape) == (4, 3) and tuple(shares.shape) == (2, 3)
    (rows.sum() + 2 * shares.sum()).backward()
    assert own.grad is not None
    return [
        float(rows.sum()),
        float(shares.sum()),
        own.grad.tolist(),
        rows[0, 0].item(),
        rows.tolist()[3][0],
        bool((shares > 0).all()),
    ]


def test_parts_that_ranks_hold() -> None:
    assert run_ranks(_parts, 2, timeout=60) == [[18.0, 18.0, [[3.0] * 3] * 2, 1.0, 2.0, True]] * 2


def _in_place() -> list[bool]:
    place = autopar.placement("cpu", [0, 1])
    x = autopar.ones(4, 2, placement=place, sbp=autopar.sbp.split(0))
    y = x + 0
    y += 2
    y.mul_(x + 1).sub_(1)
    z = autopar.zeros(4, 2, placement=place, sbp=autopar.sbp.broadcast)
    z.copy_(y)
    kept = z.sbp == (autopar.sbp.broadcast,)
    z.fill_(3.0).add_(y, alpha=2)
    return [
        bool((y == 5).all()),
        kept,
        bool((z == 13).all()),
        len(list(y)) == 4,
        "split(dim=0)" in repr(y),
    ]


def test_changes_in_place_keep_the_layout() -> None:
    assert run_ranks(_in_place, 2, timeout=60) == [[True] * 5] * 2


def _refused() -> None:
    place = autopar.placement("cpu", [0, 1])
    other = autopar.placement("cpu", [[0, 1]])
    split = autopar.sbp.split
    broadcast = autopar.sbp.broadcast
    x = autopar.randn(4, 6, placement=place, sbp=split(0))
    rows: list[tuple[Callable[[], object], str]] = [
        (lambda: autopar.placement("tpu", [0]), "valid are cuda, cpu"),
        (lambda: autopar.placement("cpu", [0, 2]), "distinct ranks from 0 to 1"),
        (lambda: autopar.placement("cpu", [0, 0]), "distinct"),
        (lambda: autopar.placement("cpu", [1, 0]), r"nearest is \[0, 1\]"),
        (lambda: autopar.placement("cpu", [[0], [1, 2]]), "lists of equal length"),
        (lambda: autopar.randn(3, 5, placement=place, sbp=split(0)), "nearest is sbp.broadcast"),
        (lambda: autopar.randn(3, 4, placement=place, sbp=split(0)), r"nearest is sbp.split\(1\)"),
        (lambda: autopar.randn(4, 4, placement=place), "needs sbp"),
        (lambda: autopar.randn(4, 4, placement=place, sbp=(split(0), broadcast)), "2 words"),
        (lambda: autopar.randn(4, 4, placement=place, sbp=split(2)), "none of the 2 dims"),
        (lambda: autopar.randn(4, 4, placement=place, sbp="S0"), "split\\(dim\\), .broadcast"),
        (lambda: x + torch.ones(4, 6), "bring it there with autopar.to_global"),
        (
            lambda: x + autopar.ones(4, 6, placement=other, sbp=(broadcast, broadcast)),
            r"x\.to_global\(placement",
        ),
        (lambda: F.dropout(x), "draws random numbers"),
        (lambda: torch.add(x, x, out=x), "take what the function returns"),
        (lambda: x.to_global(placement=other), "say how, with sbp"),
        (lambda: autopar.to_global(torch.ones(2)), "give both"),
        (lambda: autopar.to_local(torch.ones(2)), "takes a global tensor"),
        (lambda: autopar.global_tensor(x, place, split(0)), "takes a plain tensor"),
        (lambda: autopar.from_dtensor(torch.ones(2)), "takes a DTensor"),
        (
            lambda: torch.special.zeta(x, x),
            "has no sharding rule: bring its inputs to sbp.broadcast",
        ),
    ]
    for number, (call, why) in enumerate(rows):
        try:
            call()
        except AutoparError as error:
            assert re.search(why, str(error)), (number, str(error))
        else:
            raise AssertionError(f"row {number} is not refused: {why}")
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="nearest is placement"):
            autopar.placement("cuda", [0])
    whole = x.to_global(sbp=broadcast).abs() + 2
    assert torch.allclose(
        torch.special.zeta(whole, whole).full(), torch.special.zeta(whole.full(), whole.full())
    )
    with pytest.raises(RuntimeError, match="scalar outputs"):
        x.requires_grad_().backward()
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1)


def test_what_cannot_be_is_refused_with_the_nearest() -> None:
    run_ranks(_refused, 2, timeout=60)


def test_words_are_those_of_oneflow() -> None:
    assert (
        repr(autopar.sbp.split(dim=0)) == "autopar.sbp.split(dim=0)"
        and autopar.sbp.broadcast() is autopar.sbp.broadcast
    )
    with pytest.raises(UsageError, match="takes a dim"):
        autopar.sbp.split("0")


def test_one_process_is_one_rank() -> None:
    place = autopar.placement("cpu", [0])
    x = autopar.randn(3, 5, placement=place, sbp=autopar.sbp.split(0), requires_grad=True)
    value: Tensor = (x @ x.t()).sum()
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(x.grad.full(), 2 * x.full().detach().sum(0).expand(3, 5), atol=1e-5)


def test_what_stands_for_a_result_is_on_its_device() -> None:
    """Autograd has a thread for each device; on two of them exchanges would have no order."""
    x = torch.ones(2, requires_grad=True)
    empty = stand_in(torch.float32, torch.device("meta"), [x])
    assert empty.device.type == "meta" and empty.shape == (0,)
    empty.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 0.0]
