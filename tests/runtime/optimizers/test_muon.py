"""Muon over the parameters of a planned module is `torch.optim.Muon` and AdamW on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autopar
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.optimizers import muon_groups
from autopar.runtime.optimizers.newton_schulz import newton_schulz
from tests.runtime.optimizers.test_optimizers import TOKENS, _train, _whole, build

MATRICES = ("qkv.weight", "out.weight")
ADJUSTED = "match_rms_adamw"


class Both:
    """The two optimizers of one device, by the words of a loop."""

    def __init__(self, module: nn.Module, adjust: str | None) -> None:
        named = dict(module.named_parameters())
        hidden = [value for name, value in named.items() if name in MATRICES]
        others = [value for name, value in named.items() if name not in MATRICES]
        self.each: list[optim.Optimizer] = [
            optim.Muon(hidden, lr=2e-2, adjust_lr_fn=adjust),
            optim.AdamW(others, lr=1e-3, weight_decay=0.01, betas=(0.8, 0.9)),
        ]

    def zero_grad(self) -> None:
        for one in self.each:
            one.zero_grad()

    def step(self) -> None:
        for one in self.each:
            one.step()


def _ours(module: Any, adjust: str | None = None) -> optim.Optimizer:
    made: optim.Optimizer = autopar.Muon(
        module,
        lr=2e-2,
        adjust_lr_fn=adjust,
        others={"lr": 1e-3, "weight_decay": 0.01, "betas": (0.8, 0.9)},
    )
    return made


def _plan(devices: int, scheme: str) -> Plan:
    return autopar.plan(
        build(),
        (TOKENS,),
        devices=devices,
        cluster="local-cpu",
        scheme=scheme,
        mode="train",
        optimizer="muon",
    )


def _errors(plans: dict[str, Plan]) -> dict[str, float]:
    """The largest difference of a weight from one device's, after three steps."""
    errors = {}
    for name, plan in plans.items():
        for adjust in (None, ADJUSTED):
            module = autopar.parallelize(build(), plan, (TOKENS,))
            _train(module, _ours(module, adjust))
            alone = build()
            _train(alone, Both(alone, adjust))  # type: ignore[arg-type]
            pairs = zip(_whole(module), _whole(alone), strict=True)
            errors[f"{name} {adjust}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return errors


@pytest.mark.parametrize(
    ("ranks", "schemes"),
    [(1, ("data",)), (2, ("data", "zero1", "zero3", "megatron")), (4, ("2d", "zero3"))],
)
def test_one_device(ranks: int, schemes: tuple[str, ...]) -> None:
    """The update is the same to the bit: only gradients are rounded otherwise."""
    plans = {scheme: _plan(ranks, scheme) for scheme in schemes}
    for errors in run_ranks(_errors, ranks, plans, timeout=120):
        assert len(errors) == 2 * len(schemes)
        assert max(errors.values()) < 1e-9, errors


def test_state_is_one_momentum_of_a_matrix() -> None:
    module = autopar.parallelize(build(), _plan(1, "data"), (TOKENS,))
    optimizer = _ours(module)
    _train(module, optimizer, range(1))
    for name, value in module.named_parameters():
        wanted = {"momentum_buffer"} if name in MATRICES else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[value]) == wanted
    assert [group["matrices"] for group in optimizer.param_groups] == [True, False, False]


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_iteration_is_torchs(shape: tuple[int, int]) -> None:
    """One step of torch's optimizer, from zero and without decay, is the iteration's result."""
    torch.manual_seed(0)
    value = nn.Parameter(torch.zeros(shape))
    value.grad = torch.randn(shape)
    made = newton_schulz(value.grad)
    optim.Muon([value], lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn=None).step()
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    assert torch.equal(value.detach(), -scale * made.to(torch.float32))
    # Singular values are brought near 1.
    assert torch.linalg.svdvals(made.float()).sub(1).abs().max() < 0.5


def test_batches_of_matrices_are_updated_one_by_one() -> None:
    """Experts [experts, m, n] move as their matrices do in torch's optimizer."""
    torch.manual_seed(0)
    experts = nn.Parameter(torch.randn(3, 4, 6))
    each = [nn.Parameter(matrix.clone()) for matrix in experts.detach()]
    ours = autopar.Muon(muon_groups({"w": experts}, frozenset({"w"})), lr=0.1)
    theirs = optim.Muon(each, lr=0.1)
    for _ in range(3):
        experts.grad = torch.randn(3, 4, 6)
        for value, gradient in zip(each, experts.grad, strict=True):
            value.grad = gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(experts.detach(), torch.stack([value.detach() for value in each]))


def _without_some(plan: Plan) -> list[Tensor]:
    """The weights after a step in which a matrix has no gradient."""
    module = autopar.parallelize(build(), plan, (TOKENS,))
    optimizer = _ours(module)
    module(TOKENS).square().mean().backward()
    dict(module.named_parameters())["qkv.weight"].grad = None
    optimizer.step()
    # Without any gradient nothing happens.
    optimizer.zero_grad()
    before = _whole(module)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, _whole(module), strict=True))
    return [value for value, name in zip(before, dict(module.named_parameters()), strict=True)]


def test_a_matrix_without_a_gradient_stays() -> None:
    names = [name for name, _ in build().named_parameters()]
    start = dict(build().named_parameters())
    for weights in run_ranks(_without_some, 2, _plan(2, "zero3")):
        moved = {
            name
            for name, value in zip(names, weights, strict=True)
            if not torch.equal(value, start[name].detach())
        }
        assert moved == set(names) - {"qkv.weight"}


def test_usage() -> None:
    with pytest.raises(UsageError, match=r"autopar\.parallelize made, not a Model"):
        autopar.Muon(build())
    with pytest.raises(UsageError, match="takes a planned module itself"):
        autopar.Muon(build().parameters())
    module = autopar.parallelize(build(), _plan(1, "data"), (TOKENS,))
    with pytest.raises(UsageError, match="takes a planned module itself"):
        autopar.local_optimizer(autopar.Muon, module)
    with pytest.raises(UsageError, match=r"valid are original, match_rms_adamw"):
        autopar.Muon(module, adjust_lr_fn="none")
    with pytest.raises(UsageError, match=r"valid are lr, weight_decay, betas, eps"):
        autopar.Muon(module, others={"momentum": 0.9})


def _foreign(plans: dict[str, Plan]) -> dict[tuple[str, bool], float]:
    """The largest difference from one device of torch's own optimizers over a planned module."""
    errors = {}
    for name, plan in plans.items():
        for local in (False, True):
            module = autopar.parallelize(build(), plan, (TOKENS,))
            both = Both(module, None)
            if local:
                named = dict(module.named_parameters())
                hidden = [value for key, value in named.items() if key in MATRICES]
                both.each[0] = autopar.local_optimizer(optim.Muon, hidden, lr=2e-2)
            _train(module, both)  # type: ignore[arg-type]
            alone = build()
            _train(alone, Both(alone, None))  # type: ignore[arg-type]
            pairs = zip(_whole(module), _whole(alone), strict=True)
            errors[name, local] = max(float((a - b).abs().max()) for a, b in pairs)
    return errors


def test_torchs_own_over_a_planned_module() -> None:
    """It is right, as far as bfloat16 goes: it adds parts of products up in another order.

    A step of 2e-2 sqrt(3) moves an element by a third of that at the most; a norm of shards, say,
    for one of the whole would be wrong by as much.
    """
    plans = {scheme: _plan(2, scheme) for scheme in ("data", "zero1", "zero3", "megatron")}
    for errors in run_ranks(_foreign, 2, plans, timeout=120):
        assert max(errors["data", local] for local in (False, True)) < 1e-9
        assert max(errors.values()) < 6e-3, errors
