"""The sampler: every sample once an epoch, the same on any number of ranks, and none twice or lost
where a training goes on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autopar.errors import PlanError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.ranks.world import World
from autopar.runtime.training.sampling import ResumableSampler, sampler
from autopar.sharding.analysis import analyse
from tests.runtime.training.nets import BATCH, language, plan_of, tokens


@pytest.mark.parametrize(
    ("length", "batch", "last", "batches"),
    [
        (12, 4, "drop", 3),
        (13, 4, "drop", 3),
        (13, 4, "wrap", 4),
        (4, 4, "wrap", 1),
        (5, 1, "drop", 5),
    ],
)
def test_an_epoch(length: int, batch: int, last: str, batches: int) -> None:
    resumable = ResumableSampler(length, batch, last=last)
    epochs = [list(resumable) for _ in range(2)]
    assert len(resumable) == batches
    for number, epoch in enumerate(epochs):
        taken = [sample for part in epoch for sample in part]
        assert [len(part) for part in epoch] == [batch] * batches
        assert (
            taken[:length] == resumable.order(number)[: len(taken)]
            and taken[length:] == taken[: max(0, len(taken) - length)]
        )
    assert sorted(resumable.order(0)) == list(range(length)) and (
        resumable.epoch,
        resumable.done,
    ) == (2, 0)


def test_orders_are_those_of_the_seed() -> None:
    """As they were when this was written: a checkpoint is to find them again."""
    assert ResumableSampler(8, 2).order(0) == [7, 5, 3, 6, 4, 2, 0, 1]
    assert ResumableSampler(8, 2, shuffle=False).order(3) == list(range(8))
    orders = {
        tuple(ResumableSampler(8, 2, seed=seed).order(epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [3, 4])
def test_goes_on_where_it_was(workers: int, batch: int) -> None:
    """Saved in the middle of an epoch, in the loop's body; then with other batches."""
    data = TensorDataset(torch.arange(24))
    first = sampler(data, batch=4)
    seen: list[int] = []
    loader = DataLoader(
        data,
        batch_sampler=first,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    state: dict[str, Any] = {}
    for (values,) in first.counted(loader):
        seen += values.tolist()
        if len(seen) == 12:
            state = first.state_dict()
            break
    second = sampler(data, batch=batch)
    second.load_state_dict(state)
    seen += [sample for part in second for sample in part]
    assert seen == first.order(0) and second.epoch == 1


def test_one_epoch_after_the_other() -> None:
    resumable = ResumableSampler(6, 2)
    taken = [
        part for _, part in zip(range(7), resumable.counted(resumable, endless=True), strict=False)
    ]
    orders = [*resumable.order(0), *resumable.order(1), *resumable.order(2)]
    assert [sample for part in taken for sample in part] == orders[:14]


def test_the_last_batch_of_an_epoch_is_saved() -> None:
    resumable = ResumableSampler(6, 2)
    for _ in resumable:
        state = resumable.state_dict()
    again = ResumableSampler(6, 2)
    again.load_state_dict(state)
    assert (again.epoch, again.done) == (1, 0)


def test_batches_are_the_plans() -> None:
    assert sampler(100, plan_of("data", 2)).batch == BATCH


def _parts() -> list[int]:
    """The samples that this rank reads of the first batch, where each is given its part."""
    model = language()
    plan = plan_of("data", 2)
    analysis = analyse(load_model(model, ModelOptions(train=True), (tokens(0),)).graph, train=True)
    execution = plan.execution(analysis)
    module = ParallelModule(
        execution,
        World.of(execution),
        dict(model.named_parameters()) | dict(model.named_buffers()),
        options=ModuleOptions(parts=True),
    )
    return next(iter(sampler(64, module)))


def test_each_rank_reads_its_part() -> None:
    plan_of("data", 2)
    first, second = run_ranks(_parts, 2)
    assert first + second == ResumableSampler(64, BATCH).order(0)[:BATCH] and len(first) == len(
        second
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 7}, "length is 6"),
        ({"seed": 1}, "seed is 0"),
        ({"done": 9}, "is none among 6 samples"),
        ({"epoch": "x"}, "is none among"),
    ],
)
def test_another_position_is_refused(change: dict[str, Any], said: str) -> None:
    resumable = ResumableSampler(6, 2)
    with pytest.raises(PlanError, match=said):
        resumable.load_state_dict({**resumable.state_dict(), **change})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "batch=..."),
        ({"batch": 9}, "a batch of 9"),
        ({"batch": 2, "last": "keep"}, "drop, wrap"),
    ],
)
def test_what_cannot_be_sampled_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sampler(6, **options)


def test_counting_draws_no_numbers() -> None:
    """Dropout after a resume, or in a second epoch, draws what it would have drawn."""
    resumable = ResumableSampler(6, 2)
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_sampler=resumable)
    state = torch.get_rng_state()
    assert len(
        list(zip(range(7), resumable.counted(loader, endless=True), strict=False))
    ) == 7 and torch.equal(state, torch.get_rng_state())
