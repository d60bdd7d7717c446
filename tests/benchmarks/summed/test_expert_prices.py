"""Prices of a framework's layer of experts beside its products: casts of rows and last biases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.device.elementwise import CAST_TRAFFIC, memory_seconds
from autopar.costmodel.device.expert_layers import BIAS_BACKWARD, BIAS_FORWARD
from autopar.costmodel.frameworks import framework_named
from autopar.costmodel.step.covered import Seconds
from autopar.sharding.program import Compute
from autopar.sharding.rules.experts import EXPERTS
from benchmarks.validating.known import Shape
from benchmarks.validating.summed import Configuration
from benchmarks.validating.summed.issued_calls import EXPERT_BIAS, calls_of_experts
from benchmarks.validating.summed.part_figures import places_of
from benchmarks.validating.summed.part_seconds import Parts
from tests.benchmarks.known.mixture import MIXTURE

CLUSTER = load_cluster("dgx-b200").sized(1)
CORE = framework_named("megatron-core")
ROWS = MIXTURE.sequence * MIXTURE.top_k
HIDDEN = MIXTURE.hidden
INNER = MIXTURE.expert_ffn


def layer(shape: Shape, products: str = "") -> Seconds:
    """The seconds of a layer of experts on one device."""
    work = replace(CORE, kernels=replace(CORE.kernels, products=products))
    c = Configuration(global_batch=1).run_by(work)
    parts = Parts(shape, c, CLUSTER, places_of(c, CLUSTER), kinds=("experts",))
    steps = (step for step in parts.program().steps if isinstance(step, Compute))
    return parts.operator(next(step for step in steps if step.operator.kind == EXPERTS))


def passes(nbytes: float) -> float:
    return float(memory_seconds(nbytes, CLUSTER.device))


def test_rows_are_cast_before_each_product_and_gradients_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are cast once a step, which is not counted here."""
    with_casts = layer(MIXTURE, "float4")
    monkeypatch.setattr("autopar.costmodel.device.expert_layers.CAST_TRAFFIC", 0.0)
    # Prices are remembered by operator and type.
    without = layer(replace(MIXTURE, vocab=MIXTURE.vocab + 1), "float4")
    elements = 2 * ROWS * CAST_TRAFFIC
    assert with_casts.forward - without.forward == pytest.approx(
        passes(elements * (HIDDEN + INNER)), rel=1e-6
    )
    assert with_casts.backward - without.backward == pytest.approx(
        passes(elements * (2 * INNER + HIDDEN)), rel=1e-6
    )
    assert with_casts.weight == without.weight, "they read what was cast before"


def test_last_biases_of_experts_are_added_one_by_one() -> None:
    plain = layer(MIXTURE)
    biased = layer(replace(MIXTURE, bias=True))
    launch = CLUSTER.device.launch
    for name, nbytes in (("forward", BIAS_FORWARD), ("backward", BIAS_BACKWARD)):
        more = getattr(biased, name) - getattr(plain, name)
        assert more == pytest.approx(passes(nbytes * ROWS * HIDDEN) + launch, rel=1e-6)
    c = Configuration(global_batch=8, data=8, expert=8).run_by(CORE)
    added = calls_of_experts(replace(MIXTURE, bias=True), c) - calls_of_experts(MIXTURE, c)
    assert added == EXPERT_BIAS * MIXTURE.experts // 8


def test_all_products_of_experts_run_in_one_kernel() -> None:
    """Gradients of weights take about as long as the products whose operations they share."""
    seconds = layer(replace(MIXTURE, hidden=4096, expert_ffn=4096, experts=8, top_k=8))
    assert seconds.weight == pytest.approx((seconds.backward - seconds.weight), rel=0.35)
