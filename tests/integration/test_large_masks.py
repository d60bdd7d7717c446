"""Masks and positions that are too large to be whole on every device: operators of the search, on real ranks, against one device."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from autopar.sharding.analysis import analyse
from autopar.sharding.layout import Kind
from autopar.sharding.rules import preamble, registry

from .parity import Subject, failures, subject
from .plans import plans, random_plans, request
from .test_schedules import _by_chance, _segments, _under


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
    return subject(name, folder, train=train, dtype="float32" if name == "mixtral_mask" else "float64")


def _masks(model: Subject) -> list[str]:
    """The operators that give what attention reads as its mask."""
    graph = model.model.graph
    read = {op.inputs[3] for op in graph.operators if op.kind == "aten.scaled_dot_product_attention.default"}
    return [op.name for op in graph.operators if read & set(op.outputs)]


@pytest.mark.parametrize("name", ["llama_mask", pytest.param("mixtral_mask", marks=pytest.mark.slow)])
def test_a_large_mask_is_split_like_what_reads_it(name: str, folder: Path) -> None:
    """Data parallelism splits its batch, a split sequence its queries; with micro-batches and recompute too."""
    model = _subject(name, folder)
    cold = preamble(model.model.graph)
    assert _masks(model) and not cold.intersection(_masks(model))
    named = dict(plans(model.model, request((2,), train=True), randoms=0))
    analysis = analyse(model.model.graph, train=True)
    for scheme, dim in (("data", 0), ("ulysses", None)):
        decisions = named[scheme].assignment(analysis).decisions
        layouts = [decisions[mask].outputs[0][0] for mask in _masks(model)]
        assert all(p.kind is Kind.SPLIT and p.dim == dim for p in layouts) if dim is not None else layouts
    tried = {scheme: named[scheme] for scheme in ("found", "data", "ulysses", "megatron-sp")}
    tried["data 4"] = _under(named["data"], micro_batches=4, recompute=_segments(model.model))
    tried["ulysses 2"] = _under(named["ulysses"], micro_batches=2)
    assert not failures(model, request((2,), train=True), list(tried.items()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("llama_mask", marks=pytest.mark.ci), "gpt2", "bert", "vit", "mixtral_mask"])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.ci), 8])
def test_plans_by_chance(name: str, count: int, folder: Path) -> None:
    """Every layout of what no parameter leads to, with several micro-batches of samples and of one."""
    model = _subject(name, folder)
    wanted = request((2,), train=True)
    named = list(_by_chance(model, (2,), count, range(3))) if count > 1 else list(random_plans(model.model, wanted, count=3))
    assert not failures(model, wanted, named)
