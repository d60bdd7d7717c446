"""Gradients in other formats: low-rank factors with error feedback, 16 bits, what is priced and
issued, and the choice of formats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.costmodel.step.gradient_compression import Gradient, chosen_formats
from autopar.errors import PlanError, UsageError
from autopar.plan import Plan
from autopar.runtime.compression import LowRank
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.parameters.low_rank import finished

RANKS = 2
X = torch.randn(8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Net(nn.Module):
    """A wide layer, a narrow one, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(12, 32)
        self.narrow = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        output: Tensor = self.narrow(torch.tanh(self.wide(x))).square().mean()
        return output


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _plan(compress: Mapping[str, str] | float | None, **options: Any) -> Plan:
    return autopar.plan(
        build(),
        (X,),
        devices=RANKS,
        cluster="local-cpu",
        mesh=(RANKS,),
        scheme="data",
        compress=compress,
        **options,
    )


def _steps(plan: Plan, steps: int) -> list[dict[str, Tensor]]:
    """The gradients of some calls without an update in between, the first one logged: what is
    issued is what is ordered.
    """
    module = autopar.parallelize(build(), plan)
    results = []
    for _ in range(steps):
        module.zero_grad()
        with CollectiveLog() as log:
            module.loss(X).backward()  # type: ignore[no-untyped-call]
        assert not log.mismatch(module.engine.execution, dist.get_rank())
        results.append(
            {
                name: value.grad.clone()
                for name, value in module.named_parameters()
                if value.grad is not None
            }
        )
    return results


def _alone() -> dict[str, Tensor]:
    module = build()
    module(X).backward()
    return {name: value.grad for name, value in module.named_parameters() if value.grad is not None}


def test_full_rank_is_exact() -> None:
    wanted = _alone()
    plan = _plan({"*weight": "powersgd-32"})
    for actual in run_ranks(_steps, RANKS, plan, 2, timeout=60):
        for step in actual:
            assert all(
                torch.allclose(step[name], wanted[name], rtol=1e-5, atol=1e-8) for name in wanted
            )


def test_leftovers_come_with_the_next_steps() -> None:
    """With equal gradients, the sums of many steps come ever nearer to the gradients themselves."""
    wanted = _alone()
    plan = _plan({"wide.weight": "powersgd-1"})
    steps = run_ranks(_steps, RANKS, plan, 12, timeout=60)[0]
    exact = wanted["wide.weight"]
    errors = [
        float(
            (torch.stack([s["wide.weight"] for s in steps[: n + 1]]).mean(0) - exact).norm()
            / exact.norm()
        )
        for n in range(12)
    ]
    assert errors[0] > 0.05 and errors[-1] < errors[0] / 2
    assert all(torch.allclose(step["narrow.weight"], wanted["narrow.weight"]) for step in steps)


def test_sixteen_bits_are_sixteen_bits() -> None:
    wanted = _alone()
    plan = _plan({"*": "float32", "wide.weight": "bfloat16"})
    (step,) = run_ranks(_steps, RANKS, plan, 1, timeout=60)[0]
    error = float(
        (step["wide.weight"] - wanted["wide.weight"]).norm() / wanted["wide.weight"].norm()
    )
    assert 2.0**-12 < error < 2.0**-8
    assert torch.allclose(step["narrow.weight"], wanted["narrow.weight"], rtol=1e-6)
    assert not torch.equal(step["narrow.weight"], wanted["narrow.weight"])


@pytest.mark.parametrize(
    ("compress", "sizes"),
    [
        (None, [8 * (12 * 32 + 32 + 32 * 4 + 4)]),
        ({"*.weight": "powersgd-2"}, [8 * 36, 8 * 2 * (32 + 4), 8 * 2 * (12 + 32)]),
        ({"*.weight": "powersgd/2"}, [8 * 36, 8 * (32 * 4 + 4), 8 * (12 * 4 + 32)]),
        ({"*": "bfloat16"}, [2 * (12 * 32 + 32 + 32 * 4 + 4)]),
        ({"wide.*": "float32"}, [4 * (12 * 32 + 32), 8 * (32 * 4 + 4)]),
    ],
)
def test_what_travels_is_priced_by_its_bytes(
    compress: Mapping[str, str] | None, sizes: list[int]
) -> None:
    plan = _plan(compress)
    priced = sorted(c.nbytes for c in plan.collectives if c.kind == "all_reduce" and c.nbytes > 8)
    assert priced == sorted(sizes)


@pytest.mark.parametrize(
    ("compress", "options", "why"),
    [
        ({"wider.*": "bfloat16"}, {}, "unknown parameter to compress"),
        ({"*": "int8"}, {}, "valid are float32"),
        ({"*": "bfloat16"}, {"zero": 1, "scheme": None}, "plan with zero=0"),
        (1.5, {}, "from 0 to below 1"),
    ],
)
def test_what_cannot_be_compressed_is_refused(
    compress: Any, options: dict[str, Any], why: str
) -> None:
    given = {"scheme": "data", **options}
    with pytest.raises(UsageError, match=why):
        autopar.plan(
            build(),
            (X,),
            devices=RANKS,
            cluster="local-cpu",
            mesh=(RANKS,),
            compress=compress,
            **given,
        )


def test_a_plan_keeps_its_formats(tmp_path: Any) -> None:
    plan = _plan({"*.weight": "powersgd-2"})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").schedule.reductions.formats == (
        ("wide.weight", "powersgd-2"),
        ("narrow.weight", "powersgd-2"),
    )
    text = (tmp_path / "plan.json").read_text().replace("powersgd-2", "powersgd-two")
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(PlanError, match="unknown gradient format"):
        Plan.load(tmp_path / "bad.json")


def _gradient(*shape: int) -> Gradient:
    return Gradient(shape=shape, dtype="float32", seconds=lambda nbytes: 1e-9 * nbytes)


def test_formats_are_chosen_within_the_budget() -> None:
    gradients = {"large": _gradient(256, 256), "small": _gradient(16, 16), "bias": _gradient(256)}
    assert chosen_formats(gradients, 0.0) == {}
    assert set(chosen_formats(gradients, 2.0**-9).values()) == {"bfloat16"}
    some = chosen_formats(gradients, 0.5)
    more = chosen_formats(gradients, 0.95)
    assert some["bias"] == "bfloat16"
    for formats, budget in ((some, 0.5), (more, 0.95)):
        total = sum(g.size for g in gradients.values())
        error = (
            sum(gradients[n].of(form)[1] * gradients[n].size for n, form in formats.items()) / total
        )
        assert error <= budget**2
    cost = [
        sum(g.of(formats.get(n))[0] for n, g in gradients.items()) for formats in ({}, some, more)
    ]
    assert cost[0] > cost[1] >= cost[2]


def test_the_error_is_spent_where_it_saves_most_time() -> None:
    """Only one of two gradients may lose bits: that on the slower way."""
    ways = {"near": 1e-12, "far": 1e-9, "nearer": 1e-13}
    gradients = {
        n: Gradient(shape=(64,), dtype="float32", seconds=lambda nbytes, rate=rate: rate * nbytes)
        for n, rate in ways.items()
    }  # type: ignore[misc]
    assert chosen_formats(gradients, 2.0**-9 * (1.1 / 3) ** 0.5) == {"far": "bfloat16"}


def test_the_search_takes_formats_only_within_a_budget() -> None:
    assert _plan(None).schedule.reductions.formats == ()
    assert _plan(0.0).schedule.reductions.formats == ()
    assert dict(_plan(0.01).schedule.reductions.formats).get("wide.weight") == "bfloat16"


def _summed(matrices: list[Tensor], rank: int) -> Tensor:
    """The sum that several ranks make of their matrices, in one process."""
    makers = [LowRank().summed(["w"], [matrix], [rank]) for matrix in matrices]
    lefts = [next(maker)[0] for maker in makers]
    left = torch.stack(lefts).sum(0)
    rights = [maker.send([left])[0] for maker in makers]
    right = torch.stack(rights).sum(0)
    return finished(makers[0], [right])[0] if len({id(m) for m in makers}) else right


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 2, 3)])
def test_factors_of_full_rank_are_the_matrix(shape: tuple[int, ...]) -> None:
    matrices = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    ]
    rank = min(shape[0], matrices[0].numel() // shape[0])
    assert torch.allclose(_summed(matrices, rank), torch.stack(matrices).sum(0), atol=1e-5)


class Gpt(nn.Module):
    """Two layers of attention and feed-forward over letters."""

    def __init__(self, width: int = 32, vocabulary: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(16, width) * 0.02)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up, self.down = (
            nn.ModuleList(nn.Linear(a, b) for _ in range(2))
            for a, b in ((width, 4 * width), (4 * width, width))
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(tokens) + self.place
        for layer in range(2):
            q, k, v = (
                t.unflatten(-1, (4, -1)).transpose(1, 2)
                for t in self.qkv[layer](self.norms[2 * layer](x)).chunk(3, -1)
            )
            x = x + self.out[layer](
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            x = x + self.down[layer](F.gelu(self.up[layer](self.norms[2 * layer + 1](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


NEXT = torch.softmax(2 * torch.randn(24, 24, generator=torch.Generator().manual_seed(7)), -1)
"""How likely each letter follows another."""


def _letters(step: int) -> tuple[Tensor, Tensor]:
    """Rows of a language in which each letter says how likely the next ones are."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(0, 24, (32,), generator=generator)]
    for _ in range(16):
        rows.append(torch.multinomial(NEXT[rows[-1]], 1, generator=generator).squeeze(1))
    whole = torch.stack(rows, 1)
    return whole[:, :16], whole[:, 1:]


def _gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt()


def _losses(
    plan: Plan, make: Callable[..., torch.optim.Optimizer], steps: int
) -> tuple[float, int]:
    module = autopar.parallelize(_gpt(), plan)
    optimizer = make(module.parameters())
    with CollectiveLog() as log:
        module.loss(*_letters(0)).backward()  # type: ignore[no-untyped-call]
    issued = sum(
        collective.nbytes for _, collective in log.issued if collective.kind == "all_reduce"
    )
    last = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module.loss(*_letters(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        last.append(float(loss.detach()))
    return sum(last[-50:]) / 50, issued


@pytest.mark.slow
@pytest.mark.ci
def test_a_small_gpt_trains_as_well_with_rank_four() -> None:
    plans = [
        autopar.plan(
            _gpt(),
            _letters(0),
            devices=RANKS,
            cluster="local-cpu",
            mesh=(RANKS,),
            scheme="data",
            compress=compress,
        )
        for compress in (None, {"*weight": "powersgd-4", "norms*": "float32", "embed*": "float32"})
    ]
    make = functools.partial(torch.optim.AdamW, lr=3e-3)
    first = float(_gpt()(*_letters(0)).detach())
    actual = [run_ranks(_losses, RANKS, plan, make, 300, timeout=400)[0] for plan in plans]
    assert abs(actual[1][0] - actual[0][0]) <= 0.02 * actual[0][0] and actual[0][0] < 0.8 * first, (
        actual
    )
    priced = [sum(c.nbytes for c in plan.collectives if c.kind == "all_reduce") for plan in plans]
    assert [issued for _, issued in actual] == priced and priced[1] < 0.5 * priced[0]
