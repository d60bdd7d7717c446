"""Prices of a run by who runs it: every framework, its habits, its kernels, and any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.frameworks import FRAMEWORKS, Habits, Kernels, framework_named
from benchmarks.validating.configuration import Configuration
from benchmarks.validating.known import Shape
from benchmarks.validating.priced import Priced, price

CLUSTER = load_cluster("dgx-h100")
SHAPE = Shape(
    layers=2,
    hidden=1024,
    heads=8,
    kv_heads=4,
    ffn=4096,
    vocab=4096,
    sequence=2048,
    gated=True,
    tied=False,
    bias=False,
    dropout=False,
    norm="rms_norm",
    position="rotary",
)
RUN = Configuration(
    global_batch=64, micro_batch=8, tensor=4, data=2, kernels=Kernels(attention="flash2")
)
Change = dict[str, Any]


def priced(habits: Change, kernels: Change, run: Configuration = RUN) -> Priced:
    c = replace(run, habits=Habits(**habits), kernels=replace(run.kernels, **kernels))
    return price(SHAPE, c, CLUSTER)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_prices_a_model(name: str) -> None:
    work = framework_named(name)
    c = Configuration(global_batch=64, micro_batch=4, data=8, zero=1).run_by(work)
    one = price(SHAPE.run_by(work), c, CLUSTER, name)
    # What is issued kernel by kernel waits for the host forward.
    assert 0 < one.forward[0] < 1.5 * one.backward[0]
    assert 2 * (one.forward[0] + one.backward[0]) < one.step < 0.1 and one.fits


@pytest.mark.parametrize("preset", ["mi300x", "mi355x", "tpu-v5p", "trn2", "ascend-910c"])
def test_devices_that_nobody_measured_have_prices(preset: str) -> None:
    cluster = load_cluster(preset)
    bare = replace(cluster.device, kernels=None, matmul_fraction=0.5, half_size=128.0)
    older = replace(bare, attention={"flash2.forward": 0.4, "flash2.backward": 0.3})
    for name in ("megatron-core", "torchtitan-2024.12"):
        work = framework_named(name)
        c = Configuration(global_batch=8, data=8).run_by(work)
        for device in (cluster.device, older):
            one = price(SHAPE.run_by(work), c, replace(cluster, device=device), name)
            assert 0 < one.step < 1, name


@pytest.mark.parametrize(
    ("habits", "kernels"),
    [
        ({"fused": True}, {}),
        ({"loss": "one-kernel"}, {}),
        ({"compiled": True}, {}),
        ({"overlap_tensor": True}, {}),
        ({"pipelined_tensor": True}, {}),
        ({"overlap_gradients": True}, {}),
        ({"fused_accumulation": True}, {}),
        ({"gradient_bytes": 2, "reduced_bytes": 2}, {}),
        ({}, {"joined": True}),
        ({}, {"attention": "cudnn"}),
    ],
)
def test_what_frameworks_do_better_is_faster(habits: Change, kernels: Change) -> None:
    assert priced(habits, kernels).step < 0.999 * priced({}, {}).step


@pytest.mark.parametrize(
    ("habits", "kernels"),
    [
        ({"blocking": True}, {}),
        ({"loss": "megatron"}, {}),
        ({"casts_gradients": True}, {}),
        ({"accumulation_bytes": 18.0}, {}),
        ({"update_traffic": 88.0}, {}),
        ({}, {"norm": "unfused"}),
        ({}, {"repeats_keys": True}),
        ({}, {"attention": "flash1"}),
        ({}, {"attention": "triton"}),
    ],
)
def test_what_frameworks_do_beside_is_slower(habits: Change, kernels: Change) -> None:
    run = replace(RUN, tensor=1)
    assert priced(habits, kernels, run).step > 1.001 * priced({}, {}, run).step


def test_metrics_of_the_training_read_all_logits_again() -> None:
    plain, watched = (
        priced({"loss": loss}, {}).step for loss in ("one-kernel", "one-kernel, two metrics")
    )
    assert watched > 1.001 * plain


def test_narrow_products_are_those_of_large_models() -> None:
    """Casts cost as much at any width, and products more at a larger one."""
    large = replace(SHAPE, hidden=4096, heads=32, kv_heads=8, ffn=11008)
    ahead = replace(RUN, habits=Habits(compiled=True), tensor=1)
    gains = []
    for shape in (SHAPE, large):
        wide, narrow = (
            price(shape, replace(ahead, kernels=replace(ahead.kernels, products=name)), CLUSTER)
            for name in ("", "float8_e4m3fn")
        )
        gains.append(narrow.step / wide.step)
    assert gains[1] < min(gains[0], 0.85)


def test_tensor_units_read_float32() -> None:
    wide = replace(RUN, dtype="float32", habits=Habits(compiled=True))
    read = replace(wide, kernels=replace(wide.kernels, products="tfloat32"))
    assert price(SHAPE, read, CLUSTER).step < 0.6 * price(SHAPE, wide, CLUSTER).step
