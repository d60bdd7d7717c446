"""Masks and positions that are too large to be whole on every device: operators of the search, on
real ranks, against one device.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from autopar.costmodel.memory.peak import predicted_memory
from autopar.frontends.load import ModelOptions, load_model
from autopar.ir import Graph
from autopar.planning.planner import search_plan
from autopar.runtime.run import run_plan
from autopar.schemes import AXIS_SCHEMES
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import S
from autopar.sharding.micro_batches import micro_batch_options, split_batch
from autopar.sharding.rules import preamble, registry
from benchmarks.tracked_memory import fake_world, track_program
from tests.end_to_end.models import Called, tokens
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import NamedPlans, by_chance, random_plans, request
from tests.end_to_end.test_schedules import segments_of, under_schedule


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ONNX files lie."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is small enough to be made whole on every device."""
    monkeypatch.setattr(registry, "LARGE", 0)


@functools.cache
def _subject(name: str, folder: Path, train: bool = True) -> Subject:
    return subject(
        name, folder, train=train, dtype="float32" if name == "mixtral_mask" else "float64"
    )


def _masks(model: Subject) -> list[str]:
    """The operators that give what attention reads as its mask."""
    graph = model.model.graph
    read = {
        op.inputs[3]
        for op in graph.operators
        if op.kind == "aten.scaled_dot_product_attention.default"
    }
    return [op.name for op in graph.operators if read & set(op.outputs)]


@pytest.mark.parametrize(
    "name", ["llama_mask", pytest.param("mixtral_mask", marks=pytest.mark.slow)]
)
def test_a_large_mask_is_split_like_what_reads_it(name: str, folder: Path) -> None:
    """Data parallelism splits its batch, a split sequence its queries; with micro-batches and
    recompute too.
    """
    model = _subject(name, folder)
    cold = preamble(model.model.graph)
    assert _masks(model) and not cold.intersection(_masks(model))
    named = NamedPlans(model.model, request((2,), train=True))
    decisions = named["data"].assignment(analyse(model.model.graph, train=True)).decisions
    assert all(decisions[mask].outputs[0] == (S(0),) for mask in _masks(model))
    tried = {scheme: named[scheme] for scheme in ("found", "ulysses")}
    tried["data 4"] = under_schedule(
        named["data"], micro_batches=4, recompute=segments_of(model.model)
    )
    tried["ulysses 2"] = under_schedule(named["ulysses"], micro_batches=2)
    assert not failures(model, request((2,), train=True), list(tried.items()))


def _long() -> Graph:
    """A layer whose mask is larger than its values: a long sequence of little width."""
    transformers = import_module("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(
        **sizes, vocab_size=32, max_position_embeddings=512, attn_implementation="sdpa"
    )
    called = Called(
        transformers.LlamaForCausalLM(config), "input_ids", "attention_mask", use_cache=False
    )
    inputs = (tokens(4, 512) % 32, torch.ones(4, 512, dtype=torch.int64))
    return load_model(called, ModelOptions(train=True), inputs).graph


@pytest.mark.parametrize("count", [1, 2])
def test_memory_as_tracked(count: int) -> None:
    """Each rank holds its part of a mask that is split, as torch's tracker sees it."""
    graph = _long()
    wanted = replace(request((2,), train=True), limits=AXIS_SCHEMES["data"])
    plan = under_schedule(search_plan(graph, wanted), micro_batches=count)
    analysis = analyse(graph, train=True)
    actual = plan.execution(analysis)
    micro = split_batch(analysis, count)
    told = predicted_memory(
        actual.micro.program,
        micro,
        optimizer="adamw",
        composite=True,
        schedule=actual.micro.schedule,
    )
    with fake_world(2):
        tracked = track_program(actual)
    mask = 4 * 512 * 512 // (2 * count)
    assert mask > 0.1 * told.total, "the mask is what is tested"
    assert told.total == pytest.approx(tracked.peak, rel=0.05)


@pytest.mark.parametrize("large", [0, 4 * 3 * 8 * 4])
def test_positions_of_several_axes_are_split_behind_these(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time, height and width have positions of their own: the batch is the second dim.

    Without any preamble, and with one that ends where positions become angles.
    """
    monkeypatch.setattr(registry, "LARGE", large)
    transformers = import_module("transformers")
    config = transformers.Qwen3_5TextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        layer_types=["full_attention"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 1.0,
        },
    )
    torch.manual_seed(0)
    module = Called(transformers.Qwen3_5ForCausalLM(config), "input_ids", use_cache=False)
    inputs = (tokens(4, 8) % 32,)
    loaded = load_model(module, ModelOptions(train=True), inputs)
    placed = micro_batch_options(analyse(loaded.graph, train=True)).placements
    assert S(1) in placed.values()
    wanted = replace(request((2,), train=True), limits=AXIS_SCHEMES["data"])
    plan = under_schedule(search_plan(loaded.graph, wanted), micro_batches=2)
    report = run_plan(loaded, plan, check=True)
    assert report.ok, report.check


CHANCES = [
    (name, count)
    for name in ("llama_mask", "gpt2", "bert", "vit", "mixtral_mask")
    for count in (2, 1, 8)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [pytest.param(*CHANCES[0], marks=pytest.mark.ci), *CHANCES[1:]]
)
def test_plans_by_chance(name: str, count: int, folder: Path) -> None:
    """Every layout of values that depend on no parameter, with micro-batches of several sizes."""
    model = _subject(name, folder)
    wanted = request((2,), train=True)
    named = (
        list(by_chance(model.model, (2,), count, range(3)))
        if count > 1
        else list(random_plans(model.model, wanted, count=3))
    )
    assert not failures(model, wanted, named)
