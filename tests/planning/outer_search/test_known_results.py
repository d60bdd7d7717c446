"""Plans that are known: Megatron's split, data parallel, storage split under less memory, one
gather between two products.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import NoPlanFits, UsageError
from autopar.frontends.load import LoadedModel
from autopar.options.plan_options import choose_cluster
from autopar.order.scheduled import Scheduled, scheduled
from autopar.order.unit_collectives import gather_rounds
from autopar.plan import Plan
from autopar.sharding.layout import Kind, S, parse_layout
from autopar.sharding.program import Compute, Program, Redistribute
from tests.planning.modules import loaded, perceptron, plan_of, program_of, transformer

LAYERS = 3
MATRICES = ("q", "k", "v", "o", "up", "down")


def counted(program: Program) -> Counter[tuple[str, str]]:
    return Counter((c.phase, c.kind) for c in scheduled(program).collectives())


@pytest.fixture(scope="module")
def wide() -> LoadedModel:
    """Few rows, large weights."""
    return loaded(transformer(LAYERS, 4096, 32), 1, 512, 4096, dtype="bfloat16")


@pytest.fixture(scope="module")
def megatron(wide: LoadedModel) -> Plan:
    return plan_of(wide, devices=8, mesh=(8,), scheme="megatron")


def test_megatron_has_two_all_reduces_a_layer_and_direction(
    wide: LoadedModel, megatron: Plan
) -> None:
    """The input carries no gradient, so the last of the backward ones is the first norm's: its two
    vectors in a bucket.
    """
    program = program_of(megatron, wide)
    assert counted(program) == {
        ("forward", "all_reduce"): 2 * LAYERS,
        ("backward", "all_reduce"): 2 * LAYERS,
    }
    activations = [c for c in scheduled(program).collectives() if not c.tensor.endswith(".bias")]
    assert {c.nbytes for c in activations} == {512 * 4096 * 2} and len(
        activations
    ) == 4 * LAYERS - 1
    for layer in range(LAYERS):
        names = {name: megatron.operators[f"{layer}.{name}/linear"].strategy for name in MATRICES}
        assert names == {
            "q": ("n",),
            "k": ("n",),
            "v": ("n",),
            "up": ("n",),
            "o": ("k",),
            "down": ("k",),
        }
        assert [
            megatron.parameters[f"{layer}.{name}.weight"].storage for name in ("up", "down")
        ] == ["S0", "S1"]


def test_the_free_search_splits_the_weights_and_is_no_worse(
    wide: LoadedModel, megatron: Plan
) -> None:
    free = plan_of(wide, devices=8)
    assert free.predicted.step <= megatron.predicted.step * (1 + 1e-9)
    for layer in range(LAYERS):
        for name in MATRICES:
            assert all(
                option[0] in "nk" for option in free.operators[f"{layer}.{name}/linear"].strategy
            )
    with pytest.raises(UsageError, match="cannot be split along its batch"):
        plan_of(wide, devices=8, mesh=(8,), scheme="data")


@pytest.fixture(scope="module")
def tall() -> LoadedModel:
    """Many rows, small weights."""
    return loaded(transformer(2, 256, 4), 512, 128, 256)


def test_a_large_batch_and_small_weights_are_data_parallel(tall: LoadedModel) -> None:
    chosen = plan_of(tall, devices=8, mesh=(8,), zero=0)
    assert plan_of(tall, devices=8, mesh=(8,)).predicted.step <= chosen.predicted.step
    program = program_of(chosen, tall)
    for step in program.steps:
        if isinstance(step, Compute) and not step.operator.name.startswith("loss/"):
            assert step.decision.outputs == ((S(0),),), step.operator.name
    plan = scheduled(program, chosen.schedule.in_stage)
    reduced = {name for bucket in plan.buckets for name in bucket.parameters}
    assert reduced == {t.name for t in tall.graph.parameters}
    issued = Counter((c.phase, c.kind) for c in plan.collectives())
    assert issued == {("forward", "all_reduce"): 1, ("backward", "all_reduce"): len(plan.buckets)}
    assert all(parameter.storage == "R" for parameter in chosen.parameters.values())
    assert chosen.predicted.step == pytest.approx(
        plan_of(tall, devices=8, mesh=(8,), scheme="data").predicted.step, rel=1e-9
    )


def test_less_memory_splits_the_storage_before_nothing_fits() -> None:
    """Step by step: plans fit their limit and grow slower; parameters come to lie split and are
    gathered before use, unit by unit.
    """
    model = loaded(perceptron(*[1024] * 9), 8192, 1024)
    options = {
        "devices": 8,
        "mesh": (8,),
        "micro_batches": 1,
        "offload": "none",
        "optimizer": "sgd",
    }
    plans = [plan_of(model, **options)]
    # A few bytes may be worth a thousandth of a step, but no more.
    whole = plan_of(model, **options, scheme="data")
    assert plans[0].predicted.step <= 1.001 * whole.predicted.step
    assert sum(parameter.storage != "R" for parameter in plans[0].parameters.values()) <= 1
    error: NoPlanFits | None = None
    while error is None:
        limit = plans[-1].predicted.memory * 0.9
        try:
            plans.append(plan_of(model, **options, memory=limit))
        except NoPlanFits as caught:
            error = caught
        else:
            assert plans[-1].predicted.memory <= limit
    steps = [plan.predicted.step for plan in plans]
    # Which collectives hide is known of a whole program only, so that a thriftier plan may turn out
    # faster: by a sixth, where every byte counts.
    assert all(later >= 0.83 * step for step, later in itertools.pairwise(steps)) and len(plans) > 1
    split = [{name for name, p in plan.parameters.items() if p.storage != "R"} for plan in plans]
    assert split[-1]
    gathered = [
        _gathered(scheduled(program_of(plan, model), plan.schedule.in_stage)) for plan in plans
    ]
    assert any(names & used for names, used in zip(split, gathered, strict=True))
    assert error.exit_code == 4 and error.memory_limit < error.minimum <= plans[-1].predicted.memory
    last = plan_of(model, **options, memory=error.minimum * 1.01)
    assert last.predicted.memory <= error.minimum * 1.01


def _gathered(plan: Scheduled) -> set[str]:
    """The parameters of the units that are gathered in messages."""
    steps = plan.program.steps
    chains = plan.chains
    units = [u for u in plan.units if any(gather_rounds(plan.program, chains.gather(u.number)))]
    return {
        step.tensor
        for unit in units
        for index in unit.members
        if isinstance(step := steps[index], Redistribute)
    }


def test_the_smallest_memory_that_is_named_is_enough_on_any_mesh() -> None:
    model = loaded(transformer(2, 512, 8), 8, 256, 512)
    with pytest.raises(NoPlanFits) as caught:
        plan_of(model, devices=4, memory=2**20)
    assert (
        plan_of(model, devices=4, memory=caught.value.minimum * 1.01).predicted.memory
        <= caught.value.minimum * 1.01
    )


def test_rows_into_columns_is_one_gather() -> None:
    model = loaded(perceptron(2048, 2048, 2048), 4096, 2048, train=False)
    pins = ["0/linear=gpu:d0", "1/relu=gpu:d0", "2/linear=gpu:n"]
    plan = plan_of(model, devices=4, mesh=(4,), mode="infer", pins=pins)
    (only,) = scheduled(program_of(plan, model)).collectives()
    assert (only.phase, only.kind, only.axes, only.tensor, only.nbytes) == (
        "forward",
        "all_gather",
        (0,),
        "1/relu:0",
        4096 * 2048 * 4,
    )
    prices = MeshPrices(cluster=choose_cluster("dgx-h100", 4)[0], mesh=plan.mesh_)
    assert plan.predicted.communication == pytest.approx(
        prices.seconds("all_gather", (0,), 4096 * 2048 * 4), rel=1e-12
    )
    assert plan.outputs == {"2/linear:0": "S1"}


@pytest.mark.parametrize(
    "devices", [1, 7, *(pytest.param(n, marks=(pytest.mark.slow, pytest.mark.ci)) for n in (6, 12))]
)
def test_any_number_of_devices(devices: int) -> None:
    model = loaded(perceptron(1024, 4096, 1024), 84 * 64, 1024)
    plan = plan_of(model, devices=devices)
    program = program_of(plan, model)
    assert plan.devices + plan.unused == devices and plan.predicted.step > 0
    assert plan.unused <= (1 if devices == 7 else 0)
    if devices == 1:
        assert not scheduled(program).collectives() and plan.predicted.communication == 0
    else:
        assert plan.predicted.step < plan_of(model, devices=1).predicted.step


def test_sizes_that_no_axis_divides_are_left_whole() -> None:
    model = loaded(perceptron(64, 64), 8, 64)
    plan = plan_of(model, devices=7)
    assert {op.strategy for op in plan.operators.values()} <= {("R",), ("B",), ("P",)}
    assert all(
        p.kind is not Kind.SPLIT for q in plan.parameters.values() for p in parse_layout(q.storage)
    )
