"""Inputs of other sizes than planned train as on one device, or are refused in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import autopar
from autopar.errors import PlanError
from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.launch import run_ranks
from autopar.runtime.module import modes
from autopar.runtime.module.plan_sizes import as_planned_at, execution_at
from autopar.sharding.analysis import analyse
from tests.habits.workshop import PLANS, Gpt

SIZES = [(8, 4), (6, 4), (7, 4), (8, 6), (8, 3), (1, 4), (3, 5), (8, 4), (16, 4)]
EVEN = [(8, 4), (4, 4), (8, 6), (12, 3)]
PLANNED: dict[str, Any] = {"devices": 2, "cluster": "local-cpu", "proof": False}


def batch(samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, drawn for these sizes."""
    draw = torch.Generator().manual_seed(100 * samples + length)
    drawn = torch.randint(16, (samples, length + 1), generator=draw)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def losses(model: Gpt, plan: autopar.Plan | None, sizes: list[tuple[int, int]]) -> list[float]:
    """The losses of steps with batches of these sizes, then one in evaluation."""
    module: Any = copy.deepcopy(model)
    if plan is not None:
        module = autopar.parallelize(model, plan, batch(8, 4), check=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    told = []
    for size in sizes:
        optimizer.zero_grad()
        loss = module(*batch(*size))
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    module.eval()
    with torch.no_grad():
        told.append(module(*batch(4, 4)).item())
    return told


SLOW = ("data", "zero3", "zero bubble", "interleaved", "search")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PLANS]
)
def test_steps_of_other_sizes_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(0)
    model = Gpt().double()
    plan = autopar.plan(model, batch(8, 4), **PLANNED | PLANS[name])
    # A pipeline of chunks in turn needs as many micro-batches as a multiple of its stages.
    sizes = EVEN if name == "interleaved" else SIZES
    wanted = losses(model, None, sizes)
    for told in run_ranks(losses, plan.devices, model, plan, sizes, timeout=90):
        assert told == pytest.approx(wanted, abs=1e-12)


def refused(model: Gpt, plan: autopar.Plan, sizes: list[tuple[int, int]]) -> str:
    """Why a rank refuses one of the sizes."""
    with pytest.raises(PlanError) as error:
        losses(model, plan, sizes)
    return str(error.value)


def test_a_pipeline_that_cannot_be_cut_so_says_why_on_every_rank() -> None:
    model = Gpt().double()
    plan = autopar.plan(model, batch(8, 4), **PLANNED | PLANS["interleaved"])
    for said in run_ranks(refused, 2, model, plan, [(5, 4)], timeout=60):
        assert "'tokens' is [5, 4], planned as [8, 4]" in said
        assert "autopar.plan(..., reuse_from=plan)" in said


def test_only_so_many_sizes_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "SIZES", 2)
    model = Gpt().double()
    plan = autopar.plan(model, batch(8, 4), **PLANNED | {"devices": 1})
    module = autopar.parallelize(model, plan, batch(8, 4), check=False)
    for samples in (3, 5, 6, 5, 3):
        wanted = model(*batch(samples, 4)).item()
        assert module(*batch(samples, 4)).item() == pytest.approx(wanted, abs=1e-12)
    shapes = {key[2] for key in module._modes._engines if len(key) > 2}
    assert shapes == {((5, 4), (5, 4)), ((3, 4), (3, 4))}


class WithScores(Gpt):
    """A model that returns its scores beside the loss; `looks`: rows look at later ones."""

    looks = False

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The loss and the scores."""
        scores = self.logits(tokens)
        if self.looks:
            scores = scores + scores.mean(1, keepdim=True)
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


class Looking(WithScores):
    """Rows look at later ones, padding among them."""

    looks = True


def in_buckets(model: WithScores, plan: autopar.Plan) -> tuple[list[float], int]:
    """The largest errors of losses and scores at several lengths, and the programs made."""
    module = autopar.parallelize(model, plan, batch(8, 16), outputs="whole", check=False)
    twin = copy.deepcopy(model)
    errors = []
    for length in (9, 11, 17, 18, 21):
        loss, scores = module(*batch(8, length))
        wanted, whole = twin(*batch(8, length))
        assert scores.shape == whole.shape
        loss.backward()
        wanted.backward()
        errors += [(loss - wanted).abs().item(), (scores - whole).abs().max().item()]
    grown = module.full_values({n: p.grad for n, p in module.graph_parameters().items()})
    pairs = [(grown[name], value.grad) for name, value in twin.named_parameters()]
    errors += [(mine - other).abs().max().item() for mine, other in pairs]
    return errors, len(module._modes._engines)


@pytest.mark.parametrize("kind", [WithScores, Looking])
def test_lengths_share_programs_where_the_loss_sees_no_padding(kind: type[WithScores]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    options = PLANS["data, micro-batches"]
    plan = autopar.plan(model, batch(8, 16), **PLANNED, **options)
    for errors, programs in run_ranks(in_buckets, 2, model, plan, timeout=90):
        assert max(errors) < 1e-10
        # Of 9 alone, to compare, and of 24: 16 is the planned one. Else one for each length.
        assert programs == (2 if kind is WithScores else 5)


def test_another_number_of_dims_or_type_is_refused() -> None:
    model = Gpt().double()
    plan = autopar.plan(model, batch(8, 4), **PLANNED | {"devices": 1})
    module = autopar.parallelize(model, plan, batch(8, 4), check=False)
    tokens, labels = batch(8, 4)
    for given in ((tokens[0], labels), (tokens.int(), labels)):
        with pytest.raises(PlanError, match="the plan is for int64"):
            module(*given)


def test_small_sizes_keep_every_strategy_or_are_refused() -> None:
    model = Gpt().double()
    plan = autopar.plan(model, batch(8, 4), **PLANNED, scheme="data")

    def analysed(samples: int, length: int) -> Any:
        return analyse(load_model(model, ModelOptions(), batch(samples, length)).graph, train=True)

    as_planned_at(plan, analysed(2, 4))
    with pytest.raises(PlanError, match="is not split as planned"):
        as_planned_at(plan, analysed(3, 4))
    assert execution_at(plan, analysed(3, 4)).devices == 2
