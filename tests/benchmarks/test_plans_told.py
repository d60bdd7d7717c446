"""The benchmarks of plans: prices that agree, the nearest scheme, where a plan takes more than it,
and the order of measured steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.planning.model.request import Request
from autopar.schemes import Named
from autopar.schemes.wording import Factor
from benchmarks import correction, experts, measured_order
from benchmarks.measured_order import Row
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SMALL = Shape(
    layers=2, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=1024, sequence=128, dropout=False
)


def test_a_plan_costs_the_same_however_it_is_asked_for() -> None:
    request = Request(cluster=load_cluster("dgx-h100").sized(4), memory=1e15)
    actual, plan = correction.row("small", transformer(SMALL, batch=16).graph, "4", request, None)
    assert actual.explain_s == pytest.approx(
        actual.step_s, rel=1e-9
    ) and actual.pinned_s == pytest.approx(actual.step_s, rel=1e-9)
    assert actual.step_s == plan.predicted.step and abs(actual.correction) < 0.15
    assert actual.known_s is None or actual.known_s >= 0.995 * actual.step_s


@pytest.mark.parametrize(
    ("factors", "name"),
    [
        ([("megatron", 2, 0), ("megatron-sp", 4, 0)], "megatron-sp 8"),
        (
            [("pipeline-1f1b", 2, 0), ("data", 2, 0), ("data", 2, 1), ("megatron", 2, 0)],
            "pipeline-1f1b 2 x data 4 (zero1) x megatron-sp 2",
        ),
        ([("expert", 8, 0)], None),
        ([], None),
    ],
)
def test_what_one_would_ask_for(factors: list[tuple[str, int, int]], name: str | None) -> None:
    made = tuple(Factor(scheme=scheme, size=size, zero=zero) for scheme, size, zero in factors)
    assert experts.ordinary(Named(name="", axes={}, sentence="", factors=made)) == name


def test_a_difference_is_told_by_its_parts() -> None:
    actual = experts.row(
        "small", "4", transformer(SMALL, batch=64).graph, load_cluster("dgx-h100").sized(4)
    )
    assert (
        actual.step is not None
        and actual.nearest_step is not None
        and actual.difference is not None
    )
    assert (
        actual.plan
        and actual.nearest
        and "of the memory" in actual.why
        and actual.difference > -0.005
    )
    little = load_cluster("dgx-h100").sized(1)
    device = replace(little.device, memory_capacity=1e6, reserved=0.0)
    assert (
        "no plan fits"
        in experts.row(
            "small", "1", transformer(SMALL, batch=64).graph, replace(little, device=device)
        ).why
    )


def test_pairs_that_are_measured_alike_are_no_pairs() -> None:
    steps = {"data": (1.0, 2.0), "zero3": (3.0, 2.2), "tensor": (2.0, 3.0)}
    rows = [
        Row(ranks=4, model="m", plan=plan, predicted_s=p, measured_s=m)
        for plan, (p, m) in steps.items()
    ]
    (order,) = measured_order.orders(rows)
    assert (
        order.pairs == 2
        and order.wrong == ("zero3 < tensor",)
        and order.correlation == pytest.approx(0.5)
    )


def test_of_repeats_the_one_with_the_middle_error_counts() -> None:
    rows = [
        Row(ranks=2, model="m", plan="data", predicted_s=p, measured_s=m)
        for p, m in ((1.0, 1.0), (9.0, 1.0), (1.2, 1.0))
    ]
    assert measured_order.middle(tuple(rows)) == rows[2]
