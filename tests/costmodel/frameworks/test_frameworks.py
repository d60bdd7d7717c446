"""Frameworks that run plans: what of their habits changes a plan's price."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.device.host_actions import HOST_ACTIONS
from autopar.costmodel.device.operator_seconds import CROSS_ENTROPY, operator_parts
from autopar.costmodel.frameworks import (
    AUTOPAR,
    FRAMEWORKS,
    LATEST,
    Framework,
    Habits,
    framework_named,
)
from autopar.costmodel.step.casts import added_bytes
from autopar.costmodel.step.estimate import Estimate, estimate
from autopar.costmodel.step.mesh_prices import MeshPrices, update_seconds
from autopar.costmodel.step.shared_cores import hidden_messages
from autopar.errors import UsageError
from autopar.ir import Role, Tensor
from autopar.ir.stored_products import LINEAR_LOSS
from autopar.planning.model.request import Request
from autopar.runtime.proof import strategies
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import analyse
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.rules import Call
from autopar.sharding.schedule import PLAIN
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.costmodel.on_mesh import best_on_mesh
from tests.sharding.proof import by_hand

CLUSTER = load_cluster("dgx-h100").sized(4)
WEIGHT = Tensor(name="w", shape=(4096, 4096), dtype="float32", role=Role.PARAMETER, trainable=True)


def test_the_own_runtime_runs_every_cluster() -> None:
    assert framework_named("autopar") == AUTOPAR == CLUSTER.framework
    assert (
        CLUSTER.run_by(framework_named("torchtitan")).sized(2).framework.name
        == LATEST["torchtitan"]
    )
    assert {framework_named(name).name for name in FRAMEWORKS} == set(FRAMEWORKS)


def test_an_unknown_framework_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown framework 'torchtitam'.*megatron-core.*neutral"):
        framework_named("torchtitam")


def test_the_host_of_others_has_the_dispatch_of_operators_alone() -> None:
    timed = replace(CLUSTER, device=replace(CLUSTER.device, host=dict.fromkeys(HOST_ACTIONS, 1.0)))
    seconds = {
        name: sum(map(timed.run_by(framework_named(name)).host_seconds, HOST_ACTIONS))
        for name in ("autopar", "torchtitan", "torchtitan-2026.03 compiled")
    }
    assert seconds == {
        "autopar": len(HOST_ACTIONS),
        "torchtitan": 1.0,
        "torchtitan-2026.03 compiled": 0,
    }


def test_an_update_moves_what_the_framework_moves() -> None:
    own, fused = (
        float(update_seconds(WEIGHT, np.array([1]), "adamw", cluster)[0])
        for cluster in (CLUSTER, CLUSTER.run_by(framework_named("torchtitan")))
    )
    assert fused == pytest.approx((own - CLUSTER.device.launch) * 28 / 84)


@pytest.mark.parametrize(
    ("framework", "once", "per_pass"),
    [
        ("autopar", (True, True), (True, True)),
        ("megatron-2021", (False, False), (True, True)),
        ("nanotron", (False, True), (True, True)),
        # FSDP2 gathers whole stages under their first pass.
        ("torchtitan", (True, False), (True, True)),
    ],
)
def test_messages_run_under_computation_as_in_the_framework(
    framework: str, once: tuple[bool, bool], per_pass: tuple[bool, bool]
) -> None:
    run = CLUSTER.run_by(framework_named(framework))
    assert hidden_messages(run, per_pass=False) == once
    assert hidden_messages(run, per_pass=True) == per_pass
    crowded = replace(run, cores=0.5)
    assert hidden_messages(crowded, per_pass=True) == (False, False), "ranks share a core"


def test_a_step_is_longer_where_reductions_do_not_run_under_it() -> None:
    shape = Shape(
        layers=2, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=512, sequence=128, dropout=False
    )
    analysis = analyse(transformer(shape, batch=8).graph, train=True)
    mesh = Mesh(axes=(Axis(name="a", size=4, level=CLUSTER.levels[0].name),))
    request = pinned(Request(cluster=CLUSTER, mesh=mesh), scheme_named("data"), analysis)
    program = best_on_mesh(analysis, mesh, request).program

    def priced(cluster: Cluster) -> tuple[float, float]:
        prices = MeshPrices(cluster=cluster, mesh=mesh, unit_bytes=2**20)
        step = estimate(program, analysis, prices, optimizer="none")
        return step.overlapped, step.step

    hidden, own = priced(CLUSTER)
    habits = replace(AUTOPAR.habits, overlap_gradients=False)
    seen, other = priced(CLUSTER.run_by(replace(AUTOPAR, habits=habits)))
    assert hidden > 0 and seen == 0
    # What is hidden slows the computation above it, so that less is gained.
    assert own < other <= own + hidden * 1.2


FAMILIES = (
    ("megatron-2021", "megatron-2022"),
    ("megatron-core", "nemo-2024.03", "nemo-2024.07", "megatron-bridge", "moe zoo"),
    ("megatron-deepspeed",),
    ("scaling",),
    tuple(name for name in FRAMEWORKS if name.startswith("torchtitan")),
    ("fms-fsdp",),
    ("llm-foundry-2023.05", "llm-foundry-2023.10"),
    ("deepspeed zero-1", "deepspeed zero-3"),
    *(("nanotron",), ("libai",), ("maxtext",), ("automodel",), ("llama-3",), ("mist",), ("alpa",)),
)
"""Descriptions of one family of code share its vote."""


def test_the_neutral_habit_is_the_vote_of_the_families() -> None:
    neutral = FRAMEWORKS["neutral"]
    recent = {"overlap_gradients", "overlap_gather", "attention"}
    for part in ("habits", "kernels"):
        for field in fields(getattr(neutral, part)):
            votes = Counter[object]()
            for family in FAMILIES:
                for name in family:
                    votes[getattr(getattr(FRAMEWORKS[name], part), field.name)] += 1 / len(family)
            ((most, _),) = votes.most_common(1)
            chosen = getattr(getattr(neutral, part), field.name)
            assert (chosen != most) == (field.name in recent), field.name


SMALL = Shape(
    layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=512, sequence=512, dropout=False
)


def _step(framework: Framework, scheme: str = "megatron-sp", shape: Shape = SMALL) -> Estimate:
    """The estimate of a step on four devices of which each is of this scheme."""
    analysis = analyse(transformer(shape, batch=16).graph, train=True)
    mesh = Mesh(axes=(Axis(name="a", size=4, level=CLUSTER.levels[0].name),))
    request = pinned(Request(cluster=CLUSTER, mesh=mesh), scheme_named(scheme), analysis)
    program = best_on_mesh(analysis, mesh, request).program
    prices = MeshPrices(cluster=CLUSTER.run_by(framework), mesh=mesh, unit_bytes=2**20)
    return estimate(program, analysis, prices, optimizer="none")


def _with(**habits: Any) -> Framework:
    """The own runtime with other habits."""
    return AUTOPAR.but(**habits)


def test_messages_run_under_the_products_beside_them() -> None:
    plain, weights, pieces = (
        _step(_with(**habits))
        for habits in ({}, {"overlap_tensor": True}, {"pipelined_tensor": True})
    )
    for other in (weights, pieces):
        assert other.step < plain.step and other.overlapped > plain.overlapped
        assert other.communication == pytest.approx(plain.communication)


def test_gathers_that_are_not_kept_are_repeated() -> None:
    plain = _step(_with())
    repeated = _step(_with(regather=True))
    assert repeated.communication > plain.communication and repeated.step > plain.step


def test_products_that_add_their_gradients_spare_a_pass_over_them() -> None:
    kernels = added_bytes(WEIGHT, PLAIN.types, _with().habits)
    assert kernels == 3 * 4 * WEIGHT.size
    assert added_bytes(WEIGHT, PLAIN.types, _with(fused_accumulation=True).habits) == 0
    assert (
        added_bytes(WEIGHT, PLAIN.types, _with(accumulation_bytes=18.0).habits) == 18 * WEIGHT.size
    )


def test_computation_waits_for_the_host_that_issues_it() -> None:
    eager = Framework(name="eager", habits=AUTOPAR.habits)
    compiled, issued, blocked = (
        _step(eager.but(**habits)) for habits in ({"compiled": True}, {}, {"blocking": True})
    )
    # Kernels of this model are shorter than the calls that issue them.
    assert compiled.step < issued.step < blocked.step
    large = replace(SMALL, hidden=8192, heads=64, kv_heads=64, ffn=32768, sequence=4096)
    ahead, behind = (_step(eager.but(compiled=compiled), shape=large) for compiled in (True, False))
    assert behind.step == pytest.approx(ahead.step, rel=0.02)


@pytest.mark.parametrize("kind", [LINEAR_LOSS, CROSS_ENTROPY])
def test_a_loss_moves_the_bytes_of_the_frameworks_kernels(kind: str) -> None:
    case = next(case for case in by_hand()[kind])
    call = Call.of(case.graph, case.operator)
    gradients = frozenset(tensor.name for tensor in (*call.inputs, *call.outputs))
    cases = strategies(case, (2,))
    own, slow, fast = (
        operator_parts(call, cases, (2,), CLUSTER.run_by(framework), gradients)
        for framework in (AUTOPAR, *map(_of_loss, ("megatron", "in-place")))
    )
    assert np.all(slow.forward >= fast.forward) and np.all(slow.backward >= fast.backward)
    if kind == LINEAR_LOSS:
        # The own runtime makes the gradients along with the loss.
        assert np.all(own.backward < fast.backward) and np.all(own.forward > fast.forward)


def _of_loss(name: str) -> Framework:
    return Framework(name=name, habits=Habits(loss=name, compiled=True))
