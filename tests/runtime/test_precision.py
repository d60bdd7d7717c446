"""16-bit computation over parameters in a master type: values of a reference by hand, and
collectives of the priced bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.frontends.load import ModelOptions, load_model
from autopar.plan import Plan
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.models.model_values import model_values
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.run import run_plan

STEPS = 5
BATCH = 8
VOCABULARY = 32
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Net(nn.Module):
    """A block with everything that parameters are used for; one weight is read twice, one is not
    trained.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.fixed = nn.Parameter(torch.linspace(0.9, 1.1, 64), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(tokens) * self.fixed
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        logits = torch.matmul(x, self.embedding.weight.t()).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


TOKENS = torch.randint(0, VOCABULARY, (BATCH, 4), generator=torch.Generator().manual_seed(3))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Steps that are proportional to small gradients, so that noise stays noise."""
    return torch.optim.AdamW(parameters, lr=2e-3, eps=1e-2)


def by_hand(
    dtype: str, master: str, reduce: str, ranks: int, count: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one device that takes the part of each rank and micro-batch in turn,
    and adds up as they do.
    """
    module = Net()
    masters = {}
    for name, value in module.named_parameters():
        own_type = LOW[master if value.requires_grad else dtype]
        masters[name] = value.detach().to(own_type).requires_grad_(value.requires_grad)
    trained = {name: value for name, value in masters.items() if value.requires_grad}
    stepper = optimizer_of(trained.values())
    losses = []
    for _ in range(STEPS):
        used = {
            name: value.detach().to(LOW[dtype]).requires_grad_(value.requires_grad)
            for name, value in masters.items()
        }
        sums: list[dict[str, Tensor]] = []
        loss = torch.zeros(())
        for part in TOKENS.chunk(ranks):
            own: dict[str, Tensor] = {}
            for tokens in part.chunk(count):
                share = torch.func.functional_call(module, used, (tokens,)) / (ranks * count)
                gradients = torch.autograd.grad(share, [used[name] for name in trained])
                for name, gradient in zip(trained, gradients, strict=True):
                    arrived = gradient.to(LOW[reduce])
                    own[name] = own[name] + arrived if name in own else arrived
                loss += share.detach()
            sums.append(own)
        for name, value in trained.items():
            value.grad = torch.stack([own[name] for own in sums]).sum(0).to(LOW[master])
        stepper.step()
        losses.append(float(loss))
    return losses, {name: value.detach() for name, value in masters.items()}


def on_rank(
    plan: Plan, scale: float
) -> tuple[list[float], dict[str, Tensor], dict[str, bool], set[str], str]:
    """Losses, weights, whether gradients have 16 bits, types, and what was issued that was not
    priced.
    """
    module = autopar.parallelize(Net(), plan, (TOKENS,))
    stepper = optimizer_of([p for p in module.parameters() if p.requires_grad])
    losses = []
    mismatch = ""
    for _ in range(STEPS):
        stepper.zero_grad()
        with CollectiveLog() as log:
            loss = module.loss(TOKENS)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        mismatch = mismatch or log.mismatch(module.engine.execution, dist.get_rank())
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / scale)
        stepper.step()
        losses.append(float(loss.detach()))
    own = module.graph_parameters()
    weights = {name: value.clone() for name, value in module.full_values(own).items()}
    gradients = {
        name: local_of(value.grad) for name, value in own.items() if value.grad is not None
    }
    short = {name: bool((g == g.bfloat16().to(g.dtype)).all()) for name, g in gradients.items()}
    types = {
        f"{str(p.dtype)[6:]} {str(p.grad.dtype)[6:] if p.grad is not None else ''}".strip()
        for p in own.values()
    }
    return losses, weights, short, types, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan, and how its ranks take the batch; `whole`: every rank all of it."""

    scheme: str
    more: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    count: int = 1
    whole: bool = False


NARROW = {"master": "float32", "reduce": "bfloat16"}
SAME = {"master": "bfloat16"}
CASES = {
    "data": Case(scheme="data"),
    "data, 16-bit sums": Case(scheme="data", types=NARROW, count=2),
    "data, 16 bits alone": Case(scheme="data", types=SAME),
    "zero 1": Case(scheme="zero3", more={"zero": 1}, count=2),
    "zero 1, 16-bit sums": Case(scheme="zero3", more={"zero": 1}, types=NARROW, count=2),
    "zero 2": Case(scheme="zero3", more={"zero": 2}, count=2),
    "zero 3": Case(scheme="zero3", more={"zero": 3}, count=2),
    "zero 3, recomputed": Case(scheme="zero3", more={"zero": 3}),
    "tensor": Case(scheme="tensor", count=2, whole=True),
    "tensor, 16-bit sums": Case(scheme="tensor", types=NARROW, whole=True),
    "float16": Case(scheme="data", more={"dtype": "float16"}),
}


def planned(case: Case) -> Plan:
    """Its plan, read back from its file."""
    wanted = {"dtype": "bfloat16", "micro_batches": case.count, **case.more, **case.types}
    made = autopar.plan(
        Net(), (TOKENS,), devices=2, cluster="local-cpu", scheme=case.scheme, stages=1, **wanted
    )
    return Plan.model_validate_json(made.to_json())


def moved(weights: Mapping[str, Tensor]) -> Tensor:
    """How far all trained weights have come."""
    before = {name: value for name, value in Net().named_parameters() if value.requires_grad}
    return torch.cat(
        [(weights[name] - value.detach()).float().flatten() for name, value in before.items()]
    )


@pytest.mark.parametrize("name", CASES)
def test_values_of_a_reference_by_hand(name: str) -> None:
    case = CASES[name]
    plan = planned(case)
    dtype = str(case.more.get("dtype", "bfloat16"))
    master = case.types.get("master", "float32")
    reduce = case.types.get("reduce", master)
    losses, weights = by_hand(dtype, master, reduce, 1 if case.whole else 2, case.count)
    for actual, ours, short, types, mismatch in run_ranks(
        on_rank, 2, plan, 1024.0 if dtype == "float16" else 1.0, timeout=120.0
    ):
        assert not mismatch
        assert types == {f"{master} {master}", dtype}, "what is not trained is stored as it is used"
        assert all(short.values()) == (reduce == "bfloat16")
        assert actual == pytest.approx(losses, rel=2e-3)
        error = float((moved(ours) - moved(weights)).norm() / moved(weights).norm())
        assert error < 0.01, error


def test_masters_are_worth_their_bytes() -> None:
    """The tolerance above tells them apart: five steps of 16-bit weights end elsewhere."""
    wide, narrow = (
        moved(by_hand("bfloat16", master, "bfloat16", 2, 1)[1])
        for master in ("float32", "bfloat16")
    )
    assert float((wide - narrow).norm() / wide.norm()) > 0.1


def _scaled(plan: Plan, factor: float) -> tuple[list[float], float, bool, Tensor]:
    """A loop with a GradScaler; losses, the scale at the end, whether unscaled gradients are the
    parameters', the weights.
    """
    module = autopar.parallelize(Net(), plan, (TOKENS,))
    stepper = optimizer_of([p for p in module.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cpu", init_scale=factor, growth_interval=1000)
    losses = []
    same = True
    for _ in range(STEPS):
        stepper.zero_grad()
        loss = module.loss(TOKENS)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(stepper)
        same = same and all(
            p.grad.dtype == torch.float32 for p in module.parameters() if p.grad is not None
        )
        scaler.step(stepper)
        scaler.update()
        losses.append(float(loss.detach()))
    weights = {
        name: module.full_value(name, value).clone()
        for name, value in module.graph_parameters().items()
    }
    return losses, scaler.get_scale(), same, moved(weights)


@pytest.mark.parametrize("scheme", ["data", "zero3"])
def test_a_scaler_of_float16(scheme: str) -> None:
    """Gradients arrive unscaled in float32; a scale that overflows skips the step on every rank and
    is halved.
    """
    losses, weights = by_hand("float16", "float32", "float32", 2, 1)
    plan = planned(Case(scheme=scheme, more={"dtype": "float16"}))
    for actual, scale, same, ours in run_ranks(_scaled, 2, plan, 1024.0, timeout=120.0):
        assert same and scale == 1024.0
        assert actual == pytest.approx(losses, rel=2e-3)
        assert float((ours - moved(weights)).norm() / moved(weights).norm()) < 0.01
    large = run_ranks(_scaled, 2, plan, 2.0**40, timeout=120.0)
    assert {scale for _, scale, _, _ in large} == {2.0**40 / 2**STEPS}, "every step overflows"
    assert all(float(ours.norm()) == 0.0 for _, _, _, ours in large)


def test_a_pipeline_with_a_tied_weight() -> None:
    wanted: dict[str, Any] = {
        "dtype": "bfloat16",
        "stages": 2,
        "micro_batches": 4,
        "schedule": "1f1b",
    }
    plan = autopar.plan(Net(), (TOKENS,), devices=2, cluster="local-cpu", **wanted)
    assert len(plan.stages) == 2 and plan.schedule.types.master == "float32"
    losses, weights = by_hand("bfloat16", "float32", "float32", 1, 4)
    for actual, ours, _, types, mismatch in run_ranks(on_rank, 2, plan, 1.0, timeout=120.0):
        assert not mismatch and types >= {"float32 float32"}
        assert actual == pytest.approx(losses, rel=2e-3)
        assert float((moved(ours) - moved(weights)).norm() / moved(weights).norm()) < 0.01


@pytest.mark.parametrize("zero", [1, 3])
def test_the_check_of_a_run_knows_masters(zero: int) -> None:
    plan = planned(Case(scheme="zero3", more={"zero": zero}, count=2))
    model = load_model(Net(), ModelOptions(dtype="bfloat16"), (TOKENS,))
    report = run_plan(model, plan, steps=3, check=True)
    assert report.ok, report.check


def test_weights_are_not_rounded_first() -> None:
    plan = planned(CASES["data"])
    module = Net()
    model = load_model(module, ModelOptions(dtype="bfloat16"), (TOKENS,))
    values = model_values(model, plan.schedule.types)
    for name, parameter in module.named_parameters():
        value = values[name]
        assert isinstance(value, Tensor)
        assert torch.equal(value, parameter if parameter.requires_grad else parameter.bfloat16()), (
            name
        )
    low = load_model(Net().bfloat16(), ModelOptions(), (TOKENS,))
    wide = model_values(low, plan.schedule.types)["up.weight"]
    assert not isinstance(wide, Tensor) and torch.equal(wide(), Net().up.weight.bfloat16().float())


def _alone() -> tuple[Plan, Any]:
    plan = autopar.plan(Net(), (TOKENS,), devices=1, cluster="local-cpu", dtype="bfloat16")
    return plan, autopar.parallelize(Net(), plan, (TOKENS,))


def test_states_are_of_the_master_type() -> None:
    """State dict, clipping and the optimizer see float32; a module in another type is refused."""
    _, module = _alone()
    stepper = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    module.loss(TOKENS).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    stepper.step()
    kept = {name: value for name, value in module.state_dict().items() if name != "fixed"}
    assert norm.dtype == torch.float32 and {value.dtype for value in kept.values()} == {
        torch.float32
    }
    assert {value.dtype for state in stepper.state.values() for value in state.values()} == {
        torch.float32
    }
    module.load_state_dict(Net().state_dict())
    assert torch.equal(module.get_parameter("up.weight"), Net().up.weight), (
        "not rounded on its way in"
    )
    with pytest.raises(PlanError, match=r"which the plan has as torch\.float32"):
        module.bfloat16().loss(TOKENS)


def test_nothing_is_cast_where_one_type_is_enough() -> None:
    plan = autopar.plan(
        Net(), (TOKENS,), devices=1, cluster="local-cpu", master="float32", reduce="float32"
    )
    assert plan.schedule.types.master is None and plan.schedule.types.reduce is None
