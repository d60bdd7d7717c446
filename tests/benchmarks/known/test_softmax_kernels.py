"""Kernels of scale, mask and softmax: one that reads nothing that a causal mask hides, and the
chain that runs where there is none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.device.kernel_seconds import large_product_rate
from autopar.costmodel.frameworks import Framework, Kernels
from autopar.costmodel.step.covered import Seconds
from benchmarks.validating.known import Shape
from tests.benchmarks.known.operator_seconds import operator_seconds

CLUSTER = load_cluster("l4")
SHAPE = Shape(
    layers=1, hidden=2048, heads=32, kv_heads=32, ffn=8192, vocab=1024, sequence=2048, dropout=False
)
FUSED = Kernels(attention="fused", skips_masked=True)


def core(
    shape: Shape, kernels: Kernels, dtype: str = "float16", cluster: Cluster = CLUSTER
) -> dict[str, Seconds]:
    """The seconds of attention's kernels, by the last word of their names."""
    seconds = operator_seconds(shape, cluster, Framework(kernels=kernels), dtype=dtype)
    return {name.rpartition(".")[2]: one for name, one in seconds.items() if ".core." in name}


def test_half_of_the_scores_is_not_read() -> None:
    """Profiled on this device at 1,726 us forward and 2,248 us backward (Dazz993/Mist@d69e530a)."""
    softmax = core(SHAPE, FUSED)["softmax"]
    assert softmax.forward == pytest.approx(1.726e-3, rel=0.05)
    assert softmax.backward == pytest.approx(2.248e-3, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        (SHAPE, Kernels(attention="fused")),
        (replace(SHAPE, causal=False), FUSED),
        (replace(SHAPE, sequence=4096, heads=8, kv_heads=8), FUSED),  # as many scores in all
    ],
)
def test_other_kernels_read_all_of_them(shape: Shape, kernels: Kernels) -> None:
    some = core(SHAPE, FUSED)["softmax"]
    every = core(shape, kernels)["softmax"]
    assert every.forward / some.forward == pytest.approx(4 / 3, rel=0.01)
    assert every.backward / some.backward == pytest.approx(6 / 4, rel=0.01)


def test_scores_without_a_kernel_of_their_own_take_what_was_profiled() -> None:
    """Where Megatron's kernel cannot run: cast, masked, normalised and narrowed, profiled at 31 and
    49 bytes an element on four devices (Dazz993/Mist@d69e530a, 13B with ten heads a rank).
    """
    unfused = core(SHAPE, replace(FUSED, attention="unfused"))
    elements = 32 * 2048 * 2048
    rate = CLUSTER.device.memory_bandwidth * CLUSTER.device.memory_fraction
    chain = [unfused[name] for name in ("copy", "mask", "softmax", "narrow")]
    assert sum(one.forward for one in chain) * rate / elements == pytest.approx(29, rel=0.1)
    assert sum(one.backward for one in chain) * rate / elements == pytest.approx(43, rel=0.1)


def test_filling_a_view_copies_its_gradient_three_times_more() -> None:
    kernels = Kernels(attention="unfused")
    view, own = (core(SHAPE, kernels, dtype)["mask"] for dtype in ("float32", "float16"))
    assert view.backward / view.forward == pytest.approx(5, rel=0.01)
    assert own.backward / own.forward == pytest.approx(2, rel=0.01)


def test_tensor_units_read_products_of_scores_in_float32_and_nothing_else() -> None:
    kernels = Kernels(attention="unfused")
    a100 = load_cluster("dgx-a100")
    wide, read = (
        core(SHAPE, replace(kernels, products=products), "float32", a100)
        for products in ("", "tfloat32")
    )
    assert read["softmax"] == wide["softmax"] and read["mask"] == wide["mask"]
    assert read["scores"].forward < 0.8 * wide["scores"].forward


@pytest.mark.parametrize("name", ["dgx-a100", "p3.16xlarge"])
def test_products_in_float32_without_tensor_units_come_near_the_peak(name: str) -> None:
    device = load_cluster(name).device
    assert 0.9 < large_product_rate(device, "float32") / device.peak["float32"] < 0.93


def test_products_that_tensor_units_read_in_float32_take_about_twice_as_long_as_in_16_bits() -> (
    None
):
    device = load_cluster("dgx-a100").device
    ratio = large_product_rate(device, "bfloat16") / large_product_rate(device, "tfloat32")
    assert 1.9 < ratio < 2.2
