"""Seconds of a layer of experts beside its products: casts of rows, last biases, and rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.device.elementwise import CAST_TRAFFIC, memory_seconds
from autopar.costmodel.device.expert_layers import BIAS_BACKWARD, BIAS_FORWARD
from autopar.costmodel.frameworks import framework_named
from autopar.costmodel.step.covered import Seconds
from benchmarks.validating.known import Shape
from tests.benchmarks.known.mixture import MIXTURE
from tests.benchmarks.known.operator_seconds import operator_seconds

CLUSTER = load_cluster("dgx-b200").sized(1)
CORE = framework_named("megatron-core")
ROWS = MIXTURE.sequence * MIXTURE.top_k
HIDDEN = MIXTURE.hidden
INNER = MIXTURE.expert_ffn


def layer(shape: Shape, products: str = "") -> Seconds:
    """The seconds of a layer of experts on one device."""
    work = replace(CORE, kernels=replace(CORE.kernels, products=products))
    return operator_seconds(shape, CLUSTER, work)["layers.0.experts"]


def passes(nbytes: float) -> float:
    return float(memory_seconds(nbytes, CLUSTER.device))


def test_rows_are_cast_before_each_product_and_gradients_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are cast once a step, which is not counted here."""
    with_casts = layer(MIXTURE, "float4")
    monkeypatch.setattr("autopar.costmodel.device.expert_layers.CAST_TRAFFIC", 0.0)
    without = layer(MIXTURE, "float4")
    elements = 2 * ROWS * CAST_TRAFFIC
    assert with_casts.forward - without.forward == pytest.approx(
        passes(elements * (HIDDEN + INNER)), rel=1e-6
    )
    assert with_casts.backward - without.backward == pytest.approx(
        passes(elements * (2 * INNER + HIDDEN)), rel=1e-6
    )
    assert with_casts.weight == without.weight, "they read what was cast before"


def test_last_biases_of_experts_are_added_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = layer(MIXTURE)
    monkeypatch.setattr("autopar.costmodel.device.expert_layers.is_biased", lambda call: True)
    biased = layer(MIXTURE)
    launch = CLUSTER.device.launch
    for name, nbytes in (("forward", BIAS_FORWARD), ("backward", BIAS_BACKWARD)):
        more = getattr(biased, name) - getattr(plain, name)
        assert more == pytest.approx(passes(nbytes * ROWS * HIDDEN) + launch, rel=1e-6)


def test_all_products_of_experts_run_in_one_kernel() -> None:
    """Gradients of weights take about as long as the products whose operations they share."""
    seconds = layer(replace(MIXTURE, hidden=4096, expert_ffn=4096, experts=8, top_k=8))
    assert seconds.weight == pytest.approx((seconds.backward - seconds.weight), rel=0.35)


def test_experts_take_time_by_their_rows_alone() -> None:
    """No one-hot products, whose work would grow with the square of the rows."""
    large = replace(MIXTURE, experts=8, sequence=32768)
    one, two = (layer(replace(large, sequence=n)).forward for n in (32768, 65536))
    assert 1.7 < two / one < 2.05
