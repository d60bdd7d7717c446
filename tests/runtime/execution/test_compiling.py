"""`module.compile()` and `torch.compile` around a planned module: the same numbers, one graph a
segment, none broken.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule

WIDTH = 16
ROWS = 24
TOKENS = torch.randint(0, ROWS, (8, 6), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.view(*t.shape[:2], 4, -1).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        x = x + self.drop(
            self.out(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        )
        output: Tensor = x + self.down(F.gelu(self.up(x)))
        return output


class Model(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layer = Layer(rate)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(self.embed(tokens)))
        return output


def build(rate: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(rate).double()


def _trained(module: ParallelModule, call: Any) -> list[Tensor]:
    """Outputs of three steps, gradients, and outputs in evaluation."""
    torch.manual_seed(1)
    results = []
    for step in range(3):
        logits = call((TOKENS + step) % ROWS)
        logits.square().mean().backward()
        results.append(logits.detach())
    results += [
        p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
        for p in module.parameters()
        if p.grad is not None
    ]
    module.eval()
    with torch.no_grad():
        results.append(call(TOKENS))
    return results


def _compiled(plan: Plan, rate: float, exact: bool, backend: str) -> tuple[int, int, int]:
    """The numbers of compiled graphs, of breaks, and of segments that were left as they are."""
    from torch._dynamo.utils import counters

    plain, module = (autopar.parallelize(build(rate), plan, exact_random=exact) for _ in range(2))
    expected = _trained(plain, plain)
    torch._dynamo.reset()
    counters.clear()
    module.compile(backend=backend)
    module.compile(backend=backend)
    for one, other in zip(_trained(module, module), expected, strict=True):
        torch.testing.assert_close(one, other)
    segments = [
        segment for stage in module.engine.stages.values() for segment in stage.first.segments
    ]
    left = sum(not hasattr(segment.module, "_orig_mod") for segment in segments)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), left


Case = tuple[str, float, bool]
"""A scheme, the rate of dropout, and whether it draws from torch's own generator."""


def _all(plans: list[Plan], cases: list[Case], backend: str) -> list[tuple[int, int, int]]:
    return [
        _compiled(plan, rate, exact, backend)
        for plan, (_, rate, exact) in zip(plans, cases, strict=True)
    ]


def _check(ranks: int, cases: list[Case], backend: str) -> None:
    plans = [
        autopar.plan(build(rate), (TOKENS,), devices=ranks, cluster="local-cpu", scheme=scheme)
        for scheme, rate, _ in cases
    ]
    for result in run_ranks(_all, ranks, plans, cases, backend):
        for (graphs, broken, left), (_, _, exact) in zip(result, cases, strict=True):
            assert broken == 0 and (left > 0) == exact and (graphs > 0 or exact)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [("data", 0.2, False), ("data", 0.2, True)]),
        pytest.param(2, [("megatron", 0.2, False)], marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param(
            2,
            [("data", 0.0, False), ("megatron", 0.0, False), ("zero3", 0.0, False)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_segments(ranks: int, cases: list[Case]) -> None:
    """Segments with dropout draw the same masks compiled, and are left as they are where they draw
    from torch's generator.
    """
    _check(ranks, cases, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["data", pytest.param("megatron", marks=pytest.mark.ci), "zero3"]
)
def test_kernels(scheme: str) -> None:
    """The compiler that makes kernels."""
    _check(2, [(scheme, 0.2, False)], "inductor")


def _around(plan: Plan) -> bool:
    """The caller compiles the module, and a function that holds a whole step."""
    plain = autopar.parallelize(build(0.2), plan)
    expected = _trained(plain, plain)
    module = autopar.parallelize(build(0.2), plan)
    for one, other in zip(
        _trained(module, torch.compile(module, backend="aot_eager")), expected, strict=True
    ):
        assert torch.equal(one, other)
    module = autopar.parallelize(build(0.2), plan)
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain.train()))
    plain.load_state_dict(build(0.2).state_dict())

    def step(of: ParallelModule, by: torch.optim.Optimizer) -> Tensor:
        by.zero_grad()
        loss = of(TOKENS).square().mean() * 2.0
        loss.backward()
        by.step()
        return loss.detach()

    whole = torch.compile(step, backend="aot_eager")
    losses = []
    for run, of, by in ((whole, module, optimizer), (step, plain, own)):
        torch.manual_seed(2)
        losses.append([run(of, by) for _ in range(2)])
    torch.testing.assert_close(*losses)
    return True


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [
        pytest.param(2, "megatron", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param(2, "zero3", marks=pytest.mark.slow),
    ],
)
def test_compiling_around_a_module(ranks: int, scheme: str) -> None:
    plan = autopar.plan(build(0.2), (TOKENS,), devices=ranks, cluster="local-cpu", scheme=scheme)
    assert run_ranks(_around, ranks, plan) == [True] * ranks
