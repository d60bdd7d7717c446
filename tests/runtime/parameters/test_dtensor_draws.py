"""Random numbers that scripts draw on planned parameters are those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule

SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "data": {"scheme": "data"},
    "zero3": {"scheme": "zero3"},
    "megatron": {"scheme": "megatron"},
    "1f1b": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
}


class Net(nn.Module):
    """Matrices of unequal sides, vectors, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.norm(x + self.down(F.gelu(self.up(x)))).square().mean()


TOKENS = torch.arange(32).reshape(8, 4) % 12


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@functools.cache
def plan_of(scheme: str) -> Plan:
    """Made before the ranks are forked."""
    return autopar.plan(net(), (TOKENS,), devices=2, cluster="local-cpu", **SCHEMES[scheme])


def _filled(fill: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    def work(module: nn.Module) -> None:
        for value in module.parameters():
            if value.dim() > 1:
                fill(value)

    return work


def _noised(draw: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def work(module: nn.Module) -> None:
        for value in module.parameters():
            value.add_(draw(value))

    return work


def _by_generator(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for value in module.parameters():
        nn.init.uniform_(value, generator=generator)


def _by_type(module: nn.Module) -> None:
    """As most libraries do."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(part.weight, std=0.02)


def _half(value: Tensor) -> Tensor:
    return torch.full_like(value, 0.5)


DRAWS: dict[str, Callable[[nn.Module], None]] = {
    "normal_": _filled(nn.init.normal_),
    "uniform_": _filled(nn.init.uniform_),
    "trunc_normal_": _filled(nn.init.trunc_normal_),
    "kaiming_uniform_": _filled(nn.init.kaiming_uniform_),
    "kaiming_normal_": _filled(nn.init.kaiming_normal_),
    "xavier_normal_": _filled(nn.init.xavier_normal_),
    "orthogonal_": _filled(nn.init.orthogonal_),
    "sparse_": _filled(lambda value: nn.init.sparse_(value, 0.3)),
    "eye_": _filled(nn.init.eye_),
    "data.normal_": _filled(lambda value: value.data.normal_()),
    "exponential_": _filled(lambda value: value.data.exponential_()),
    "log_normal_": _filled(lambda value: value.data.log_normal_()),
    "random_": _filled(lambda value: value.data.random_(7)),
    "bernoulli_": _filled(lambda value: value.data.bernoulli_(0.3)),
    "bernoulli_ of a tensor": _filled(lambda value: value.data.bernoulli_(_half(value))),
    "by type": _by_type,
    "by a generator": _by_generator,
    "randn_like": _noised(torch.randn_like),
    "rand_like": _noised(torch.rand_like),
    "randint_like": _noised(lambda value: torch.randint_like(value, 5)),
    "dropout": _noised(F.dropout),
    "bernoulli": _noised(lambda value: torch.bernoulli(_half(value))),
    "normal of means": _noised(lambda value: torch.normal(value, 0.5)),
    "new_empty": _noised(lambda value: torch.empty_like(value).normal_()),
    "transposed": _noised(lambda value: torch.randn_like(value.t()).t()),
    "dropout of rows": _noised(lambda value: F.dropout1d(value + 1) if value.dim() > 1 else value),
    "halves": _noised(lambda value: torch.randn_like(value, dtype=torch.bfloat16)),
}


def _drawn(scheme: str) -> dict[str, Any]:
    """The weights after each draw, and the generator's next number; words where it is refused."""
    module: Any = net()
    if scheme:
        module = autopar.parallelize(module, plan_of(scheme), (TOKENS,))
    results: dict[str, Any] = {}
    for name, draw in DRAWS.items():
        torch.manual_seed(7)
        for value in module.parameters():
            nn.init.zeros_(value)
        try:
            draw(module)
        except PlanError as error:
            results[name] = str(error)
            continue
        held = dict(module.named_parameters())
        if isinstance(module, ParallelModule):
            held = module.full_values(module.graph_parameters())
        results[name] = {key: value.detach().clone() for key, value in held.items()}, torch.rand(2)
    return results


@pytest.mark.parametrize("scheme", SCHEMES)
def test_draws_are_those_of_one_device(scheme: str) -> None:
    plan_of(scheme)
    wanted = _drawn("")
    for actual in run_ranks(_drawn, 2, scheme):
        for name in DRAWS:
            torch.testing.assert_close(actual[name], wanted[name], rtol=0, atol=0, msg=name)


def _seeded_alike(scheme: str) -> list[str]:
    module = autopar.parallelize(net(), plan_of(scheme), (TOKENS,))
    torch.manual_seed(torch.distributed.get_rank())
    said = []
    for draw in (
        lambda: nn.init.normal_(module.up.weight),
        lambda: torch.rand_like(module.up.bias),
    ):
        with pytest.raises(PlanError) as raised:
            draw()
        said.append(str(raised.value))
    return said


@pytest.mark.parametrize("scheme", ["zero3", "megatron"])
def test_generators_at_other_places_are_refused_on_every_rank(scheme: str) -> None:
    plan_of(scheme)
    first, second = run_ranks(_seeded_alike, 2, scheme)
    assert first == second and all("torch.manual_seed with one number" in said for said in first)
