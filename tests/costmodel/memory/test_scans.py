"""Memory of linear recurrences: what a shard of the sequence keeps, and what a backward pass holds,
beside torch's tracker of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.costmodel.memory.peak import predicted_memory
from autopar.frontends.load import ModelOptions, load_model
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.runtime.proof import Sample, sample
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.split_operators.state_scans import split_delta_rule, split_state_space
from autopar.sharding.analysis import analyse
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.rules import saved_scans
from autopar.sharding.rules.registry import Call
from autopar.sharding.rules.saved_for_backward import Made, backward_scratch, keeps
from autopar.torch_operators import chunked, scans
from benchmarks.tracked_memory import _total, _Tracker, fake_world, track_program
from tests.end_to_end.models import Called
from tests.end_to_end.plans import request
from tests.end_to_end.recurrent_models import recurrent_model
from tests.end_to_end.test_context_parallel import SEQUENCE

RANKS = 4
LENGTH = 2048
HEADS = 4
GROUPS = 2
CHUNK = 64


def _delta(length: int, width: int, columns: int, channels: bool = False) -> Sample:
    keys = {name: torch.zeros(2, length, GROUPS, width) for name in ("query", "key")}
    return sample(
        "autopar.gated_delta_rule.default",
        **keys,
        value=torch.zeros(2, length, HEADS, columns),
        decay=torch.zeros(2, length, HEADS, *(width,) * channels),
        beta=torch.zeros(2, length, HEADS),
        chunk_size=CHUNK,
        normalize=True,
    )


def _state_space(length: int, width: int, columns: int) -> Sample:
    keys = {name: torch.zeros(2, length, GROUPS, width) for name in ("key", "query")}
    return sample(
        "autopar.state_space_scan.default",
        x=torch.zeros(2, length, HEADS, columns),
        step=torch.zeros(2, length, HEADS),
        decay=torch.zeros(HEADS),
        **keys,
        skip=torch.zeros(HEADS),
        bias=torch.zeros(HEADS),
        chunk_size=CHUNK,
        softplus=True,
        low=0.0,
        high=float("inf"),
    )


def _bytes(case: Sample, made: Sequence[Made], shards: int) -> float:
    """Bytes of buffers on a shard of the sequence."""
    call = Call.of(case.graph, case.operator)
    return sum(
        float(one.nbytes * call.inputs[one.position].size / shards * one.times(shards, LENGTH))
        for one in made
    )


def _tracked(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes that a call saves, and the most that its passes hold, besides what is given to the
    passes and what they give.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        leaves = [torch.zeros(value.shape, requires_grad=True) for value in inputs]
        tracker = _Tracker()
        tracker.track_external(*leaves)
        with tracker:
            out = function(*leaves)
            saved = _total(tracker, "current")
            gradients = torch.autograd.grad(out, leaves, torch.zeros_like(out))
        given = sum(value.nbytes for value in leaves)
        passed = out.nbytes + sum(value.nbytes for value in gradients)
        return saved - given - out.nbytes, _total(tracker, "peak") - given - passed - out.nbytes


@pytest.mark.parametrize("columns", [8, 32])
@pytest.mark.parametrize("kind", [_delta, _state_space])
def test_a_shard_keeps_as_much_as_is_told(kind: Callable[..., Sample], columns: int) -> None:
    whole = kind(LENGTH, 8, columns)
    local = kind(LENGTH // RANKS, 8, columns)
    told = keeps(Call.of(whole.graph, whole.operator), [True] * len(whole.values))
    assert told.inputs == tuple(range(len(whole.values)))
    assert _bytes(whole, told.made, 1) == 0, "a whole sequence keeps its inputs only"
    names = list(local.operator.attributes)[: len(local.values)]
    rest = {k: v for k, v in local.operator.attributes.items() if k not in names}
    function: Any = split_delta_rule if kind is _delta else split_state_space
    with fake_world(RANKS):
        axis = Axis(name="rank", size=RANKS, level="node")
        group = DeviceGroups.create(Mesh(axes=(axis,))).axes[0]
        saved, _ = _tracked(
            lambda *t: function(**dict(zip(names, t, strict=True)), **rest, group=group),
            local.values,
        )
    assert saved == _bytes(whole, told.made, RANKS)


@pytest.mark.parametrize("sizes", [(64, 64), (128, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("kind", ["delta", "channels", "state space"])
def test_a_backward_pass_holds_as_much_as_is_told(kind: str, sizes: tuple[int, int]) -> None:
    """Within a seventh: which values are alive at once depends on their sizes."""
    length = LENGTH // RANKS
    if kind == "state space":
        case = _state_space(length, *sizes)
        function: Any = scans.state_space_scan
    else:
        case = _delta(length, *sizes, channels=kind == "channels")
        function = scans.gated_delta_rule
    names = list(case.operator.attributes)[: len(case.values)]
    rest = {k: v for k, v in case.operator.attributes.items() if k not in names}
    _, held = _tracked(lambda *t: function(**dict(zip(names, t, strict=True)), **rest), case.values)
    told = _bytes(case, backward_scratch(Call.of(case.graph, case.operator)), 1)
    assert told == pytest.approx(held, rel=1 / 7)


def test_channels_are_scanned_in_chunks_of_one_size() -> None:
    assert saved_scans.CHANNEL_ROWS == chunked.CHANNEL_ROWS
    assert np.isclose(Made(output=False, position=0, nbytes=1.0).times(4, LENGTH), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_model_with_split_sequences_as_tracked(name: str) -> None:
    module = Called(recurrent_model(name, vocab_size=96), "input_ids", use_cache=False)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    graph = load_model(module, ModelOptions(), example_inputs=(tokens,)).graph
    wanted = request((RANKS,), train=True)
    assert wanted.mesh is not None
    axis = wanted.mesh.axes[0].name
    factors = {op.name: {axis: SEQUENCE[op.kind]} for op in graph.operators if op.kind in SEQUENCE}
    plan = search_plan(graph, replace(wanted, limits=Pins(operators=factors)))
    analysis = analyse(graph, train=True)
    program = plan.execution(analysis)
    told = predicted_memory(program.micro, analysis, optimizer="adamw", composite=True)
    with fake_world(RANKS):
        tracked = track_program(program)
    assert told.saved == pytest.approx(tracked.saved, rel=0.02)
    assert told.total == pytest.approx(tracked.peak, rel=0.1)
