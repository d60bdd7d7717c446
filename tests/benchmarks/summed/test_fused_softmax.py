"""Megatron's kernel of scale, mask and softmax: it reads nothing that a causal mask hides, and
takes four matrices of scores at once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.device.kernel_seconds import large_product_rate
from autopar.costmodel.frameworks import Kernels
from autopar.costmodel.step.covered import Seconds
from autopar.sharding.program import Compute
from benchmarks.validating.known import Shape
from benchmarks.validating.summed import Configuration
from benchmarks.validating.summed.analysed_graphs import own_kernels
from benchmarks.validating.summed.part_figures import places_of
from benchmarks.validating.summed.part_seconds import Parts

CLUSTER = load_cluster("l4").sized(1)
SHAPE = Shape(
    layers=1, hidden=2048, heads=32, kv_heads=32, ffn=8192, vocab=1024, sequence=2048, dropout=False
)
FUSED = Kernels(attention="fused", skips_masked=True)


def softmax(shape: Shape, kernels: Kernels, dtype: str = "float16") -> Seconds:
    c = Configuration(global_batch=1, kernels=kernels, dtype=dtype)
    parts = Parts(shape, c, CLUSTER, places_of(c, CLUSTER))
    steps = [
        s
        for s in parts.program().steps
        if isinstance(s, Compute) and s.operator.name.endswith(".core.softmax")
    ]
    return parts.operator(steps[0])


def test_half_of_the_scores_is_not_read() -> None:
    """Profiled on this device at 1,726 us forward and 2,248 us backward (Dazz993/Mist@d69e530a)."""
    actual = softmax(SHAPE, FUSED)
    assert actual.forward == pytest.approx(1.726e-3, rel=0.05)
    assert actual.backward == pytest.approx(2.248e-3, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        (SHAPE, Kernels(attention="fused")),
        (replace(SHAPE, causal=False), FUSED),
        (replace(SHAPE, sequence=4096, heads=8, kv_heads=8), FUSED),  # as many scores in all
    ],
)
def test_other_kernels_read_all_of_them(shape: Shape, kernels: Kernels) -> None:
    some = softmax(SHAPE, FUSED)
    every = softmax(shape, kernels)
    assert every.forward / some.forward == pytest.approx(4 / 3, rel=0.01)
    assert every.backward / some.backward == pytest.approx(6 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("heads", "tensor", "micro_batch", "kernel"),
    [
        (32, 1, 1, "fused"),
        (40, 4, 1, "unfused"),
        (40, 4, 2, "fused"),
        (6, 1, 1, "unfused"),
        (40, 2, 1, "fused"),
    ],
)
def test_there_is_no_kernel_for_some_numbers_of_heads(
    heads: int, tensor: int, micro_batch: int, kernel: str
) -> None:
    c = Configuration(
        global_batch=micro_batch, micro_batch=micro_batch, tensor=tensor, kernels=FUSED
    )
    shape = replace(SHAPE, hidden=heads * 64, heads=heads, kv_heads=heads)
    assert own_kernels(shape, c).attention == kernel
    assert (
        own_kernels(shape, replace(c, kernels=Kernels(attention="fused"))).attention == "fused"
    ), "another project's kernel"


def test_scores_in_float32_are_neither_copied_nor_narrowed() -> None:
    def kinds(dtype: str) -> set[str]:
        c = Configuration(global_batch=1, kernels=Kernels(attention="unfused"), dtype=dtype)
        parts = Parts(SHAPE, c, CLUSTER, places_of(c, CLUSTER))
        names = [op.name for op in parts.program().graph.operators if ".core." in op.name]
        return {name.rpartition(".")[2] for name in names}

    assert kinds("float16") - kinds("float32") == {"copy", "narrow"}


@pytest.mark.parametrize(
    ("name", "least", "most"), [("dgx-a100", 0.9, 0.93), ("p3.16xlarge", 0.9, 0.93)]
)
def test_products_in_float32_without_tensor_units_come_near_the_peak(
    name: str, least: float, most: float
) -> None:
    assert (
        least
        < large_product_rate(load_cluster(name).device, "float32")
        / load_cluster(name).device.peak["float32"]
        < most
    )


def test_products_that_tensor_units_read_in_float32_take_about_twice_as_long_as_in_16_bits() -> (
    None
):
    device = load_cluster("dgx-a100").device
    ratio = large_product_rate(device, "bfloat16") / large_product_rate(device, "tfloat32")
    assert 1.9 < ratio < 2.2
    tf32 = softmax(SHAPE, replace(FUSED, attention="unfused", products="tfloat32"), "float32")
    assert tf32 == softmax(SHAPE, replace(FUSED, attention="unfused"), "float32"), (
        "what is no product stays as it is"
    )


def seconds(kernels: Kernels, dtype: str) -> dict[str, Seconds]:
    c = Configuration(global_batch=1, kernels=kernels, dtype=dtype)
    parts = Parts(SHAPE, c, CLUSTER, places_of(c, CLUSTER))
    steps = [
        s for s in parts.program().steps if isinstance(s, Compute) and ".core." in s.operator.name
    ]
    return {step.operator.name.rpartition(".")[2]: parts.operator(step) for step in steps}


def test_scores_without_a_kernel_of_their_own_take_what_was_profiled() -> None:
    """Where Megatron's kernel cannot run: cast, masked, normalised and narrowed, profiled at 31 and
    49 bytes an element on four devices (Dazz993/Mist@d69e530a, 13B with ten heads a rank).
    """
    unfused = seconds(replace(FUSED, attention="unfused"), "float16")
    elements = 32 * 2048 * 2048
    rate = CLUSTER.device.memory_bandwidth * CLUSTER.device.memory_fraction
    chain = [unfused[name] for name in ("copy", "mask", "softmax", "narrow")]
    assert sum(one.forward for one in chain) * rate / elements == pytest.approx(29, rel=0.1)
    assert sum(one.backward for one in chain) * rate / elements == pytest.approx(43, rel=0.1)


def test_filling_a_view_copies_its_gradient_three_times_more() -> None:
    view = seconds(Kernels(attention="unfused"), "float32")["mask"]
    assert view.backward / view.forward == pytest.approx(5, rel=0.01)
    own = seconds(Kernels(attention="unfused"), "float16")["mask"]
    assert own.backward / own.forward == pytest.approx(2, rel=0.01)
