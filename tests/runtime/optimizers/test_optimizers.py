"""Optimizers over the parameters of a planned module.

Equal to one device, natively and on shards.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.optimizers import LocalOptimizer, SummedOptimizer, is_elementwise

WIDTH = 16
ROWS = 24
TOKENS = torch.randint(0, ROWS, (8, 6), generator=torch.Generator().manual_seed(0))
Make = Callable[..., optim.Optimizer]


class Model(nn.Module):
    """Tied embeddings, and a fused projection whose column split lies in three pieces; no gradient
    is zero but for rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (
            t.view(*t.shape[:2], 4, -1).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        output: Tensor = self.head(x + self.out(attended))
        return output


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


class Lamb(optim.Optimizer):
    """Adam with steps as long as the norm of each parameter."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                if not state:
                    state.update(m=torch.zeros_like(value), v=torch.zeros_like(value))
                state["m"].mul_(0.9).add_(value.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(value.grad, value.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                value.add_(update * (value.norm() / update.norm()), alpha=-group["lr"])


class Shared(optim.Optimizer):
    """Steps as long as the norm of all gradients together: no parameter is updated by itself."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [value for group in self.param_groups for value in group["params"]]
        norm = sum(value.grad.square().sum().item() for value in given) ** 0.5
        for value in given:
            value.add_(value.grad, alpha=-0.1 / norm)


def _of(kind: Make, **options: Any) -> Make:
    return functools.partial(kind, **options)


ELEMENTWISE: dict[str, Make] = {
    "sgd": _of(optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "sgd fused": _of(optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "adam": optim.Adam,
    "adamw": _of(optim.AdamW, foreach=False),
    "adamw foreach": _of(optim.AdamW, foreach=True),
    "adamw fused": _of(optim.AdamW, fused=True),
    "adamw amsgrad": _of(optim.AdamW, amsgrad=True, maximize=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "adagrad": optim.Adagrad,
    "adagrad fused": _of(optim.Adagrad, fused=True),
    "adadelta": optim.Adadelta,
    "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
}
OTHER: dict[str, Make] = {
    "lamb": Lamb,
    "shared": Shared,
    "adafactor": optim.Adafactor,
    "adafactor foreach": _of(optim.Adafactor, foreach=True),
}
NOT_ON_DTENSORS = frozenset(
    {"sgd fused", "adagrad fused", "rprop", "adafactor", "adafactor foreach", "shared"}
)
"""What torch cannot do where parameters are split: operators without a rule, changes in place of
partial results, their `item()`.
"""
SCHEMES = ("data", "megatron", "zero3")
TWICE = range(2)
"""Two steps: the second reads the state that the first has made."""


def _train(module: nn.Module, optimizer: optim.Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        optimizer.zero_grad()
        logits = module((TOKENS + step) % ROWS)
        (logits.square().mean() + logits.sum() * 0.01).backward()
        optimizer.step()


def _whole(module: nn.Module) -> list[Tensor]:
    return [
        p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        for p in module.parameters()
    ]


@torch.library.custom_op("autopar_test::ranked", mutates_args=())
def _ranked(value: Tensor) -> Tensor:
    """Elements by rank in their column: an operator of which DTensor knows nothing."""
    return value.argsort(0).to(value.dtype)


@_ranked.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@functools.cache
def _alone(name: str) -> list[Tensor]:
    module = build()
    _train(module, {**ELEMENTWISE, **OTHER}[name](module.parameters()), TWICE)
    return _whole(module)


def _error(module: nn.Module, name: str) -> float:
    pairs = zip(_whole(module), _alone(name), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def _plans(ranks: int) -> dict[str, Plan]:
    schemes = SCHEMES if ranks > 1 else SCHEMES[:1]
    return {
        name: autopar.plan(build(), (TOKENS,), devices=ranks, cluster="local-cpu", scheme=name)
        for name in schemes
    }


def _all(plans: dict[str, Plan], names: list[str]) -> dict[tuple[str, str, str], float | str]:
    results: dict[tuple[str, str, str], float | str] = {}
    for scheme, plan in plans.items():
        module = autopar.parallelize(build(), plan)
        start = build().state_dict()
        for name in names:
            kind = {**ELEMENTWISE, **OTHER}[name]
            if name not in NOT_ON_DTENSORS or scheme == "data":
                module.load_state_dict(start)
                _train(module, kind(module.parameters()), TWICE)
                results[scheme, name, "native"] = _error(module, name)
            module.load_state_dict(start)
            optimizer = autopar.local_optimizer(kind, module)
            _train(module, optimizer, TWICE)
            results[scheme, name, type(optimizer).__name__] = _error(module, name)
            given = [p for group in optimizer.param_groups for p in group["params"]]
            assert given == list(module.parameters())
            for value in given:
                for held in optimizer.state[value].values():
                    assert held.shape != value.shape or type(held) is (
                        type(value.detach()) if isinstance(value, DTensor) else Tensor
                    )
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_of_one_device(ranks: int) -> None:
    plans = _plans(ranks)
    assert ranks == 1 or "S0/3" in {p.storage for p in plans["megatron"].parameters.values()}
    names = [*ELEMENTWISE, *OTHER] if ranks > 1 else ["adamw fused", "rprop", *OTHER]
    for result in run_ranks(_all, ranks, plans, names):
        assert {
            key: error
            for key, error in result.items()
            if not isinstance(error, float) or error > 1e-9
        } == {}
        for scheme, name, how in result:
            apart = scheme != "data" and name in OTHER
            assert how in ("native", "SummedOptimizer" if apart else "LocalOptimizer"), (
                scheme,
                name,
                how,
            )


@pytest.mark.parametrize("name", [*ELEMENTWISE, *OTHER])
def test_what_is_elementwise(name: str) -> None:
    assert is_elementwise({**ELEMENTWISE, **OTHER}[name], {}) == (name in ELEMENTWISE)


def test_what_needs_a_closure_is_not() -> None:
    assert not is_elementwise(optim.LBFGS, {})


def _state_between(save: Plan, load: Plan, folder: str) -> list[float]:
    """Train, save, load under another plan, go on: on shards and on DTensors, which read each
    other's states.
    """
    errors = []
    for number, kinds in enumerate([(True, True), (True, False), (False, True)]):
        modules = [autopar.parallelize(build(), plan) for plan in (save, load)]
        first, second = (
            autopar.local_optimizer(optim.AdamW, m, lr=1e-2)
            if local
            else optim.AdamW(m.parameters(), lr=1e-2)
            for m, local in zip(modules, kinds, strict=True)
        )
        _train(modules[0], first, range(2))
        state = dict(zip(("model", "optimizer"), get_state_dict(modules[0], first), strict=True))
        dcp.save(state, checkpoint_id=Path(folder, str(number)))
        state = dict(zip(("model", "optimizer"), get_state_dict(modules[1], second), strict=True))
        dcp.load(state, checkpoint_id=Path(folder, str(number)))
        set_state_dict(
            modules[1], second, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        _train(modules[1], second, range(2, 3))
        alone = build()
        _train(alone, optim.AdamW(alone.parameters(), lr=1e-2))
        errors.append(
            max(
                (a - b).abs().max().item()
                for a, b in zip(_whole(modules[1]), _whole(alone), strict=True)
            )
        )
    return errors


def test_states_between_plans() -> None:
    plans = _plans(2)
    with tempfile.TemporaryDirectory() as folder:
        for errors in run_ranks(_state_between, 2, plans["megatron"], plans["zero3"], folder):
            assert max(errors) < 1e-9


def _usage(plan: Plan) -> None:
    """Groups, schedules of learning rates, closures, new groups, parameters that become other
    tensors, copies of the state.
    """
    module = autopar.parallelize(build(), plan)
    alone = build()

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        values = list(of.parameters())
        return [{"params": values[:2], "lr": 1e-3}, {"params": values[2:3]}]

    def made(of: nn.Module, make: Callable[[list[dict[str, Any]]], optim.Optimizer]) -> None:
        optimizer = make(groups(of))
        schedule = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        _train(of, optimizer, range(1))
        schedule.step()
        optimizer.add_param_group({"params": list(of.parameters())[3:], "lr": 3e-3})
        kept = copy.deepcopy(optimizer.state_dict())
        of.load_state_dict(of.state_dict(), assign=True)
        of.to(torch.float64)
        _train(of, optimizer, range(2))
        optimizer.load_state_dict(kept)

        def closure() -> float:
            optimizer.zero_grad()
            loss = of(TOKENS).square().mean()
            loss.backward()
            return float(loss)

        assert optimizer.step(closure) > 0

    made(module, lambda given: autopar.local_optimizer(optim.AdamW, given, lr=1e-2, fused=True))
    made(alone, lambda given: optim.AdamW(given, lr=1e-2, fused=True))
    for one, other in zip(_whole(module), _whole(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
    held = autopar.host_states(autopar.local_optimizer(optim.AdamW, module), module)
    assert isinstance(held, LocalOptimizer)

    class Strange(Lamb):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for value in self.param_groups[0]["params"]:
                value.copy_(_ranked(value.norm() * value))

    module = autopar.parallelize(build(), plan)
    optimizer = autopar.local_optimizer(Strange, module.parameters())
    assert isinstance(optimizer, SummedOptimizer)
    with pytest.raises(
        RunError, match="Strange cannot update parameters that are split over ranks"
    ):
        _train(module, optimizer, range(1))
    again = autopar.local_optimizer(Lamb, module.parameters())
    again.load_state_dict(again.state_dict())
    assert again.state is again.inner.state


def test_usage() -> None:
    run_ranks(_usage, 2, _plans(2)["zero3"])


DOCUMENTS: dict[str, Make] = {
    "lamb": _of(autopar.Lamb, lr=0.02, weight_decay=0.1),
    "momentum": _of(autopar.Momentum, lr=0.01, nesterov=True),
    "small adamw": _of(autopar.SmallAdamW, lr=1e-3),
}


def test_lamb_is_its_formula() -> None:
    """Against a second writing of it, on one device."""
    torch.manual_seed(0)
    value = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    other = torch.zeros(4, 3, dtype=torch.float64)
    other.copy_(value.detach())
    optimizer = autopar.Lamb([value], lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.05)
    mean = 0.0
    square = 0.0
    for step in range(1, 5):
        gradient = torch.randn(4, 3, dtype=torch.float64)
        value.grad = gradient.clone()
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        update = mean / (1 - 0.8**step) / ((square / (1 - 0.9**step)).sqrt() + 1e-5) + 0.05 * other
        other -= 0.1 * other.norm() / update.norm() * update
        assert torch.allclose(value, other, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_its_formula(nesterov: bool) -> None:
    torch.manual_seed(0)
    value = nn.Parameter(torch.randn(5, dtype=torch.float64))
    other = value.detach().clone()
    speed = torch.zeros(5, dtype=torch.float64)
    optimizer = autopar.Momentum([value], 0.1, 0.8, nesterov=nesterov, weight_decay=0.2)
    for _ in range(4):
        gradient = torch.randn(5, dtype=torch.float64)
        value.grad = gradient.clone()
        optimizer.step()
        decayed = gradient + 0.2 * other
        speed = 0.8 * speed + decayed
        other -= 0.1 * (decayed + 0.8 * speed if nesterov else speed)
        assert torch.allclose(value, other, rtol=1e-12)


def _documents(plans: dict[str, Plan]) -> dict[tuple[str, str], float]:
    results = {}
    for scheme, plan in plans.items():
        for name, kind in DOCUMENTS.items():
            module = autopar.parallelize(build(), plan, (TOKENS,))
            make = (
                kind(module.parameters())
                if name == "lamb"
                else autopar.local_optimizer(kind, module)
            )
            _train(module, make, TWICE)
            alone = build()
            _train(alone, kind(alone.parameters()), TWICE)
            results[scheme, name] = max(
                float((a - b).abs().max())
                for a, b in zip(_whole(module), _whole(alone), strict=True)
            )
    return results


def test_optimizers_of_the_documents_are_those_of_one_device() -> None:
    """LAMB's norms are those of whole parameters, whatever part of them a rank holds."""
    for rank in run_ranks(_documents, 2, _plans(2), timeout=120):
        assert all(
            error < (1e-4 if name == "small adamw" else 1e-9) for (_, name), error in rank.items()
        ), rank
