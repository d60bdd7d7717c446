"""Micro-batches, ZeRO and recompute on real ranks: outputs, gradients and weights of one device,
and the collectives that are priced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import plan as plan_model
from autopar.errors import PlanError
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.plan_parts import SchedulePlan, StagePlan
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.run import run_plan
from autopar.sharding.analysis import analyse
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import ZEROS, NamedPlans, by_chance, request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ONNX files lie."""
    return tmp_path_factory.mktemp("models")


@functools.cache
def _subject(name: str, folder: Path, train: bool = True) -> Subject:
    return subject(name, folder, train=train, dtype="float32" if name == "mixtral" else "float64")


def segments_of(model: LoadedModel, count: int = 2) -> tuple[tuple[str, ...], ...]:
    """Stretches of operators with some left out between them."""
    names = [op.name for op in analyse(model.graph, train=True).warm]
    size = len(names) // (count + 1)
    return tuple(tuple(names[i * size + 3 : (i + 1) * size - 2]) for i in range(count))


def under_schedule(plan: Plan, **schedule: object) -> Plan:
    """The plan under a schedule, read back from its file."""
    return Plan.model_validate_json(
        plan.model_copy(update={"schedule": SchedulePlan.model_validate(schedule)}).to_json()
    )


def _scheduled(
    model: Subject, sizes: tuple[int, ...], counts: tuple[int, ...]
) -> Iterator[tuple[str, Plan]]:
    """Plain data parallelism and stored shards in all modes, with and without recompute."""
    base = NamedPlans(model.model, request(sizes, train=True))
    segments = segments_of(model.model)
    for count in counts:
        for recompute in ((), segments):
            if count > 1 or recompute:
                yield (
                    f"data {count} {len(recompute)}",
                    under_schedule(base["data"], micro_batches=count, recompute=recompute),
                )
            for zero, (gathered, accumulated) in ZEROS.items():
                plan = under_schedule(
                    base["zero3"],
                    micro_batches=count,
                    recompute=recompute,
                    gathered=gathered,
                    accumulated=accumulated,
                )
                yield f"{zero} {count} {len(recompute)}", plan


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpt2_onnx", ("zero1 2 2", "zero3 2 2")),
        ("llama_exact", ("zero2 2 0",)),
        ("residual_onnx", ("data 4 2", "zero3 1 0")),
    ],
)
def test_training(name: str, wanted: tuple[str, ...], folder: Path) -> None:
    """A few of the combinations."""
    model = _subject(name, folder)
    named = dict(_scheduled(model, (2,), (1, 2, 4)))
    assert not failures(model, request((2,), train=True), [(one, named[one]) for one in wanted])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.ci),
        "llama_exact",
        "residual_onnx",
        "bert",
        "vit",
        "gpt2_onnx",
        "gpt2_labels",
    ],
)
def test_training_in_every_combination(name: str, folder: Path) -> None:
    model = _subject(name, folder)
    assert not failures(model, request((2,), train=True), list(_scheduled(model, (2,), (1, 2, 4))))


@pytest.mark.slow
@pytest.mark.ci
def test_plans_by_chance_on_two_axes(folder: Path) -> None:
    model = _subject("gpt2", folder)
    assert not failures(
        model, request((2, 2), train=True), list(by_chance(model.model, (2, 2), 2, range(2)))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpt2", "gpt2_labels", "bert", "llama_exact", "mixtral", "vit", "residual_onnx", "gpt2_onnx"],
)
@pytest.mark.parametrize("count", [2, 8])
def test_more_plans_by_chance(name: str, count: int, folder: Path) -> None:
    """With 8 micro-batches each is one sample."""
    model = _subject(name, folder)
    assert not failures(
        model, request((2,), train=True), list(by_chance(model.model, (2,), count, range(10, 16)))
    )


def _pinned(model: Subject, kind: str, option: str) -> Plan:
    """The plan on two ranks in which all operators of a kind take an option."""
    wanted = request((2,), train=True)
    assert wanted.mesh is not None
    names = [op.name for op in model.model.graph.operators if kind in op.kind]
    pins = Pins(operators={name: {wanted.mesh.axes[-1].name: option} for name in names})
    assert names
    return search_plan(model.model.graph, replace(wanted, limits=pins))


SPLITS = [("gpt2", "ring"), ("gpt2", "ulysses"), ("mixtral", "dispatch")]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [SPLITS[0], *(pytest.param(*split, marks=pytest.mark.slow) for split in SPLITS[1:])],
)
def test_splits_of_the_sequence_and_of_experts(name: str, scheme: str, folder: Path) -> None:
    model = _subject(name, folder)
    if scheme == "ring":
        base = _pinned(model, "attention", "k")
    elif scheme == "dispatch":
        offers = analyse(model.model.graph, train=True).offers.values()
        option = next(
            o.name
            for offer in offers
            for o in offer.options
            if o.communication == "dispatch" and "experts" in offer.call.operator.kind
        )
        base = _pinned(model, "autopar.experts", option)
    else:
        base = NamedPlans(model.model, request((2,), train=True))[scheme]
    plan = under_schedule(base, micro_batches=2, recompute=segments_of(model.model))
    assert not failures(model, request((2,), train=True), [(scheme, plan)])


def test_inference(folder: Path) -> None:
    """Outputs are joined."""
    model = _subject("gpt2", folder, False)
    base = NamedPlans(model.model, request((2,), train=False))
    named = [(name, under_schedule(base[name], micro_batches=4)) for name in ("data", "tensor")]
    assert not failures(model, request((2,), train=False), named)


# --- the usual loop, with dropout ---


class _Dropping(nn.Module):
    """Two layers with dropout before, between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Dropout(0.2),
            nn.Linear(16, 32),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(32, 8),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the output."""
        out: Tensor = self.layers(x).square().mean()
        return out


def _dropping() -> LoadedModel:
    torch.manual_seed(0)
    return load_model(_Dropping().train().double(), ModelOptions(train=True), (_batch(),))


def _batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@functools.cache
def _dropping_plan(zero: str = "zero1", again: bool = True) -> Plan:
    """Four micro-batches on two ranks, the middle of the model recomputed."""
    model = _dropping()
    names = [op.name for op in analyse(model.graph, train=True).warm]
    gathered, accumulated = ZEROS[zero]
    base = NamedPlans(model, request((2,), train=True))["zero3"]
    return under_schedule(
        base,
        micro_batches=4,
        recompute=(tuple(names[1:6]),) if again else (),
        gathered=gathered,
        accumulated=accumulated,
    )


def _steps(plan: Plan) -> list[tuple[float, list[Tensor]]]:
    """Three steps of SGD as anybody writes them, with a loss that is scaled and gradients that add
    up over two calls.
    """
    model = _dropping()
    ours = autopar.parallelize(model, plan, exact_random=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.9)
    torch.manual_seed(7)
    results = []
    for _ in range(3):
        loss = ours.loss(_batch())
        optimizer.zero_grad()
        (3 * loss).backward()
        ours.loss(2 * _batch()).backward()
        optimizer.step()
        results.append(
            (
                float(loss),
                [ours.full_value(n, p).clone() for n, p in ours.graph_parameters().items()],
            )
        )
    return results


def _alone() -> list[tuple[float, list[Tensor]]]:
    torch.manual_seed(0)
    module = _Dropping().train().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    torch.manual_seed(7)
    results = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(_batch())
        (3 * loss).backward()
        module(2 * _batch()).backward()
        optimizer.step()
        results.append((float(loss.detach()), [p.detach().clone() for p in module.parameters()]))
    return results


@pytest.mark.parametrize("zero", ZEROS)
def test_the_usual_loop_with_dropout(zero: str) -> None:
    """Masks of one device for every micro-batch, and the same ones when the segment runs again."""
    wanted = _alone()
    for actual in run_ranks(_steps, 2, _dropping_plan(zero), timeout=120.0):
        for (loss, weights), (mine, own) in zip(wanted, actual, strict=True):
            assert mine == pytest.approx(loss, rel=1e-10)
            for weight, other in zip(weights, own, strict=True):
                assert torch.allclose(weight, other, rtol=1e-9, atol=1e-12)


def _accumulated(plan: Plan) -> list[Tensor]:
    """Two calls, the first under `no_sync`."""
    ours = autopar.parallelize(_dropping(), plan, exact_random=True)
    torch.manual_seed(7)
    with ours.no_sync():
        ours.loss(_batch()).backward()
    ours.loss(2 * _batch()).backward()
    grads = {name: p.grad for name, p in ours.graph_parameters().items()}
    return [ours.full_value(name, grad) for name, grad in grads.items() if grad is not None]


def test_accumulation_outside_of_the_step() -> None:
    torch.manual_seed(0)
    module = _Dropping().train().double()
    torch.manual_seed(7)
    module(_batch()).backward()
    module(2 * _batch()).backward()
    wanted = [p.grad for p in module.parameters()]
    data = NamedPlans(_dropping(), request((2,), train=True))["data"]
    for plan in (under_schedule(data, micro_batches=2), _dropping_plan("zero1")):
        for actual in run_ranks(_accumulated, 2, plan, timeout=120.0):
            assert len(actual) == len(wanted)
            assert all(
                torch.allclose(w, f, rtol=1e-9, atol=1e-12)
                for w, f in zip(wanted, actual, strict=True)
                if w is not None
            )


# --- what is refused, stages, and the command ---


def _regression() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), (torch.zeros(8, 16),)


def _called(plan: Plan) -> str:
    module, inputs = _regression()
    ours = autopar.parallelize(module, plan)
    with torch.no_grad():
        assert ours(*inputs).shape == (8, 4)
    assert ours.loss(*inputs).requires_grad
    with pytest.raises(PlanError, match=r"2 micro-batches.*call loss\(...\)") as caught:
        ours(*inputs)
    return str(caught.value)


def test_a_loss_made_of_the_outputs_is_refused_with_the_reason() -> None:
    module, inputs = _regression()
    plan = under_schedule(
        plan_model(module, inputs, devices=2, cluster="local-cpu"), micro_batches=2
    )
    assert len(set(run_ranks(_called, 2, plan, timeout=60.0))) == 1


def test_stages_run() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())]
    module = nn.Sequential(*layers, nn.Linear(16, 4))
    inputs = (torch.zeros(8, 16),)
    plan = plan_model(
        module, inputs, devices=4, cluster="local-cpu", stages=2, micro_batches=2, mesh=(2,)
    )
    assert [stage.devices for stage in plan.stages] == [2, 2]
    report = run_plan(
        load_model(module, ModelOptions(train=True), inputs), plan, steps=2, check=True
    )
    assert report.ok and report.ranks == 4, report


def test_a_stage_without_operators_is_refused_before_any_rank_starts() -> None:
    module, inputs = _regression()
    plan = plan_model(module, inputs, devices=2, cluster="local-cpu")
    stage = StagePlan(
        first=next(iter(plan.operators)), mesh=plan.mesh, forward=0.0, backward=0.0, memory=0.0
    )
    with pytest.raises(PlanError, match="stages do not follow one another"):
        run_plan(
            load_model(module, ModelOptions(train=True), inputs),
            plan.model_copy(update={"stages": (stage, stage)}),
            check=True,
        )


def test_a_run_with_a_check(folder: Path) -> None:
    model = _subject("gpt2_onnx", folder).model
    plan = dict(_scheduled(_subject("gpt2_onnx", folder), (2,), (2,)))["zero3 2 0"]
    report = run_plan(model, plan, steps=2, check=True)
    assert report.ok, report
    assert "as priced" in report.collectives
    assert run_plan(model, plan, steps=2).losses == pytest.approx(report.losses, rel=1e-6)
