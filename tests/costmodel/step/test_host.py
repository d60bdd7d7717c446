"""Optimizer state in host memory: the stream of updates, its bytes, and a program's time and memory
with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import load_cluster
from autopar.costmodel.memory.peak import predicted_memory
from autopar.costmodel.memory.precision import Precision
from autopar.costmodel.memory.states import Training, states_of
from autopar.costmodel.step.estimate import estimate
from autopar.costmodel.step.host_offload import (
    COPIES,
    SHARE,
    host_rate,
    state_bytes,
    stream_seconds,
    streamed_bytes,
    streamed_update,
)
from autopar.costmodel.step.mesh_prices import MeshPrices, update_seconds
from autopar.ir import Role, Tensor
from autopar.planning.model.request import Request
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.state_chunks import chunks
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.costmodel.on_mesh import best_on_mesh

CLUSTER = load_cluster("dgx-h100").sized(2)
DEVICE = replace(CLUSTER.device, launch=0.0)
Jobs = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=20)


def played(updates: Sequence[float], copies: Sequence[float]) -> float:
    """The stream by events: three engines, each in order, and three places for chunks, given back
    when one has gone out.
    """
    ends: list[tuple[float, float, float]] = []
    for number, chunk in enumerate(chunks(copies)):
        update = sum(updates[chunk])
        copy = sum(copies[chunk])
        free = ends[number - 3][2] if number >= 3 else 0.0
        settled = ends[number - 2][1] if number >= 2 else 0.0
        came = max(ends[-1][0] if ends else 0.0, free, settled) + copy
        done = max(came, ends[-1][1] if ends else 0.0) + update
        ends.append((came, done, max(done, ends[-1][2] if ends else 0.0) + copy))
    return ends[-1][2]


@given(st.lists(st.floats(0, 1), max_size=20))
def test_chunks_hold_all_and_none_more_than_the_largest(sizes: list[float]) -> None:
    parts = [sizes[chunk] for chunk in chunks(sizes)]
    assert [size for part in parts for size in part] == sizes
    assert all(sum(part) <= max(sizes) * (1 + 1e-9) for part in parts)
    assert all(
        sum(part) + following[0] > max(sizes) * (1 - 1e-9)
        for part, following in itertools.pairwise(parts)
    )


@given(Jobs)
def test_a_stream_takes_what_its_slowest_engine_takes(jobs: list[tuple[int, int]]) -> None:
    updates, copies = ([job[i] for job in jobs] for i in range(2))
    actual = stream_seconds(updates, [copy * host_rate(DEVICE) for copy in copies], DEVICE)
    assert actual == pytest.approx(played(updates, copies))
    assert actual >= max(sum(updates), sum(copies)) - 1e-9
    assert actual <= sum(updates) + 2 * sum(copies) + 1e-9


@pytest.mark.parametrize(("update", "copy"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_a_long_stream_of_equals_takes_the_longer_of_both_for_each(
    update: float, copy: float
) -> None:
    actual = [
        stream_seconds([update] * n, [copy * host_rate(DEVICE)] * n, DEVICE) for n in (50, 51)
    ]
    assert actual[1] - actual[0] == pytest.approx(max(update, copy))


def test_three_chunks_are_on_the_device_at_once() -> None:
    assert streamed_bytes([]) == 0
    assert streamed_bytes([5.0, 1.0]) == 6
    assert streamed_bytes([5.0, 1.0, 1.0, 7.0, 2.0, 6.0]) == 7 + 7 + 2


def test_the_price_of_one_parameter() -> None:
    tensor = Tensor(
        name="w", shape=(4096, 4096), dtype="bfloat16", role=Role.PARAMETER, trainable=True
    )
    shards = np.array([1, 8])
    assert state_bytes(tensor, shards, "adamw").tolist() == [2 * tensor.bytes, tensor.bytes / 4]
    assert state_bytes(tensor, shards, "sgd").tolist() == [0, 0]
    rate = SHARE * 64e9
    wanted = [2 * tensor.bytes / s / rate + COPIES * CLUSTER.device.launch for s in (1, 8)]
    assert streamed_update(tensor, shards, "adamw", CLUSTER).tolist() == pytest.approx(
        wanted, rel=1e-12
    )
    near = replace(CLUSTER, device=replace(CLUSTER.device, host_bandwidth=2e13))
    shorter = update_seconds(tensor, shards, "adamw", near) + COPIES * near.device.launch
    assert streamed_update(tensor, shards, "adamw", near).tolist() == pytest.approx(
        shorter.tolist(), rel=1e-12
    )


def _program(*, batch: int = 8, sequence: int = 64) -> tuple[Program, Analysis, MeshPrices]:
    """A small transformer planned for two devices."""
    shape = Shape(
        layers=2,
        hidden=256,
        heads=4,
        kv_heads=4,
        ffn=1024,
        vocab=512,
        sequence=sequence,
        dropout=False,
    )
    analysis = analyse(transformer(shape, batch=batch).graph, train=True)
    mesh = Mesh(axes=(Axis(name="a", size=2, level=CLUSTER.levels[0].name),))
    best = best_on_mesh(analysis, mesh, Request(cluster=CLUSTER))
    return best.program, analysis, best.tables.prices


def _in_host(program: Program, names: Sequence[str]) -> Program:
    return build_program(program.graph, replace(program.assignment, host=frozenset(names)))


def test_a_program_with_state_in_host_memory() -> None:
    program, analysis, prices = _program()
    names = [tensor.name for tensor in program.graph.parameters]
    plain = estimate(program, analysis, prices, optimizer="adamw")
    for held in (names[:1], names[::2], names):
        priced = estimate(_in_host(program, held), analysis, prices, optimizer="adamw")
        assert priced.memory.optimizer + priced.memory.host == pytest.approx(plain.memory.optimizer)
        assert priced.memory.host > 0
        assert priced.memory.total == pytest.approx(plain.memory.total - priced.memory.host), (
            "the peak is in the backward pass"
        )
        assert priced.step - plain.step == pytest.approx(priced.update - plain.update)
        assert (
            priced.streamed == pytest.approx(priced.update - plain.update) and priced.streamed > 0
        )


@pytest.mark.parametrize("shards", [1, 8])
def test_a_stream_takes_little_more_than_the_sum_of_its_prices(shards: int) -> None:
    """The parameters of GPT-2 XL, small ones between large ones, against what the tables count for
    each.
    """
    shape = Shape(
        layers=48, hidden=1600, heads=25, kv_heads=25, ffn=6400, vocab=50257, sequence=1024
    )
    tensors = transformer(shape, batch=1).graph.parameters
    split = np.array([shards])
    sizes = [float(state_bytes(t, split, "adamw")[0]) for t in tensors]
    actual = stream_seconds(
        [float(update_seconds(t, split, "adamw", CLUSTER)[0]) for t in tensors],
        sizes,
        CLUSTER.device,
    )
    added = sum(float(streamed_update(t, split, "adamw", CLUSTER)[0]) for t in tensors)
    assert added < actual < 1.1 * added


def test_the_states_that_stream_count_at_the_update() -> None:
    """Beside all gradients: the states that stream, and the temporaries of one parameter, or of all
    that have theirs on the device.
    """
    program, analysis, prices = _program(batch=2, sequence=8)
    tensors = [t for t in program.graph.parameters if t.trainable]
    sizes = {
        t.name: local_bytes(program.assignment.storage[t.name], t.bytes, prices.mesh.shape)
        for t in tensors
    }
    whole = sum(sizes.values())
    for held in (list(sizes), list(sizes)[::2]):
        streams = sum(sizes[name] for name in held)
        in_host = _in_host(program, held)
        states = states_of(in_host, analysis, Training(optimizer="adamw"))
        assert (states.gradients, states.host, states.optimizer) == (
            whole,
            2 * streams,
            2 * (whole - streams),
        )
        alone = streamed_bytes([2 * sizes[name] for name in held]) + max(sizes.values())
        needed = states.temporaries("adamw", Precision(), one_by_one=False)
        assert needed == max(alone, whole - streams)
        memory = predicted_memory(in_host, analysis, optimizer="adamw")
        assert (
            memory.host == states.host
            and memory.total >= states.parameters + states.optimizer + whole + needed
        )
