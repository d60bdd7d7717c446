"""Ranks forked from this process: results in order, and every way to fail ends promptly with its
reason.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RunError, UsageError
from autopar.runtime.launch import (
    forked_ranks,
    in_steps,
    init_from_environment,
    rank_process,
    run_ranks,
)
from autopar.runtime.ranks.process_groups import group_of, late, message_group


def test_results_come_in_order() -> None:
    torch.randn(2000, 500) @ torch.randn(
        500, 2000
    )  # the parent's thread pool must not hang its children

    def work(factor: int) -> tuple[int, float]:
        total = torch.ones(1000) * dist.get_rank()
        dist.all_reduce(total)
        return factor * dist.get_rank(), float(
            (torch.randn(300, 300) @ torch.randn(300, 300)).isfinite().sum() + total[0]
        )

    assert run_ranks(work, 3, 10) == [(0, 90003.0), (10, 90003.0), (20, 90003.0)]
    assert not multiprocessing.active_children()


def test_one_rank_uses_all_cores() -> None:
    torch.randn(2000, 500) @ torch.randn(500, 2000)

    def work() -> int:
        torch.randn(2_000_000).exp().sum()
        return torch.get_num_threads()

    assert run_ranks(work, 1, timeout=30) == [os.cpu_count()]


def _raises() -> None:
    if dist.get_rank() == 1:
        raise LookupError("the reason")
    dist.all_reduce(torch.ones(1))


def _dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def _leaves() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def _tells_late() -> None:
    """The others notice the broken connection before the rank's own error is told."""
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(0.3)
        raise LookupError("the reason")
    dist.all_reduce(torch.ones(1))


def _unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_raises, "rank 1 failed:\nTraceback(.|\n)*LookupError: the reason"),
        (_tells_late, "rank 1 failed:\nTraceback(.|\n)*LookupError: the reason"),
        (_dies, "rank 1 was killed by SIGKILL"),
        (_leaves, "rank 0 ended with exit code 7"),
        (_unpicklable, "rank . failed:(.|\n)*pickle"),
    ],
)
def test_failures_name_their_cause(function: object, message: str) -> None:
    assert callable(function)
    with pytest.raises(RunError, match=message):
        run_ranks(function, 3, timeout=60)
    assert not multiprocessing.active_children()


def test_a_hung_rank_is_ended() -> None:
    with pytest.raises(RunError, match=r"rank 0, 1 did not finish within 1 s"):
        run_ranks(time.sleep, 2, 100, timeout=1)
    assert not multiprocessing.active_children()


def _stops() -> None:
    for number in in_steps(5):
        dist.all_reduce(torch.ones(1))
        if number == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "BEAT", 0.1)
    monkeypatch.setattr(forked_ranks, "SILENCE", 0.8)
    with pytest.raises(RunError, match=r"^rank 1 has not been heard of for 0.8 s in step 3$"):
        run_ranks(_stops, 3, timeout=60)
    assert not multiprocessing.active_children()


def _stays_away(whole: bool) -> None:
    group = dist.group.WORLD
    if not whole and dist.get_rank() < 2:
        group = group_of([0, 1])
    for number in in_steps(3):
        if number == 1 and dist.get_rank() == 1:
            time.sleep(100)
        if whole or dist.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize("whole", [True, False])
def test_a_rank_that_keeps_others_waiting_is_named(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(rank_process, "LATE", 2.0)
    with pytest.raises(
        RunError,
        match=(
            r"^rank 1 has not joined in what the others waited for in step 1: rank [02] failed in "
            r"step 1"
        ),
    ):
        run_ranks(_stays_away, 3, whole, timeout=60)


def _limits() -> set[float]:
    """The timeouts of all groups before, in and after steps."""
    groups = [dist.group.WORLD, group_of([1, 0]), message_group(0, 1)]
    limits = []
    for _ in in_steps(3):
        limits += [_limit(group) for group in groups]
    return {*limits, *map(_limit, groups)}


def _waits_for_others() -> None:
    if dist.get_rank() == 0:
        time.sleep(4.0)


def test_a_rank_waits_for_the_end_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may work on for longer than a rank may be late to a collective."""
    monkeypatch.setattr(rank_process, "LATE", 2.0)
    assert run_ranks(_waits_for_others, 2, timeout=60) == [None, None]


def _limit(group: Any) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def _limit_of_new_groups() -> float:
    limit = late()
    assert limit is not None
    return limit.total_seconds()


def test_checked_collectives_wait_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert run_ranks(_limit_of_new_groups, 2, timeout=77) == [77.0] * 2


@pytest.mark.parametrize(
    ("timeout", "endless", "wanted"), [(2000, False, 600), (200, False, 200), (2000, True, 2000)]
)
def test_a_rank_may_be_late_in_every_step(timeout: float, endless: bool, wanted: float) -> None:
    """A step may compile, wait for data or follow an evaluation, as the first one does."""
    assert run_ranks(_limits, 2, timeout=timeout, endless=endless) == [{wanted}] * 2


def test_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        RunError,
        match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: "
        "start this program with torchrun",
    ):
        init_from_environment("gloo")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"unknown backend 'nickel'.*valid"):
        init_from_environment("nickel")
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="nccl needs CUDA"):
            init_from_environment("nccl")


def test_ranks_meet_by_their_environment() -> None:
    """The environment that torchrun sets, twice over: a restarted generation does not meet the dead
    one.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def work(generation: int) -> float:
        rank = dist.get_rank()
        dist.barrier()  # whoever leaves before the others have joined breaks their connections
        dist.destroy_process_group()
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port)
        )
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(generation)
        )
        assert init_from_environment("gloo", timeout=30) == torch.device("cpu")
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    assert [run_ranks(work, 2, generation, timeout=60) for generation in range(2)] == [
        [2.0, 2.0]
    ] * 2
