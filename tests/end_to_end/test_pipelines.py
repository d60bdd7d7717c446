"""Every kind of model, with its dropout, under every kind of plan: losses and weights of one
device, and a log that equals the order.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.runtime.local_forms.randomness import is_random
from autopar.runtime.run import run_plan
from tests.end_to_end.parity import Subject, failures_on, subject
from tests.end_to_end.plans import by_chance, in_stages

STEPS = 10
_ZERO3 = {"gathered": "per_pass", "accumulated": "shards"}


def _pipeline(
    schedule: str, ranks: int, *, stages: int = 0, count: int = 4, **more: Any
) -> dict[str, Any]:
    """Stages of equal size under a schedule."""
    return {
        "devices": ranks,
        "stages": stages or ranks,
        "micro_batches": count,
        "schedule": schedule,
        "interleave": 1,
    } | more


PLANS: Mapping[str, Mapping[str, Any]] = {
    "data": {"devices": 2, "scheme": "data"},
    "data accumulated": {"devices": 4, "scheme": "data", "micro_batches": 2},
    "zero1": {"devices": 2, "scheme": "zero1", "micro_batches": 2},
    "zero2": {"devices": 2, "scheme": "zero2", "micro_batches": 2},
    "zero3": {"devices": 4, "scheme": "zero3", "micro_batches": 2, "recompute": "full"},
    "megatron": {"devices": 2, "scheme": "megatron"},
    "megatron-sp": {"devices": 4, "scheme": "megatron-sp"},
    "2d": {"devices": 4, "scheme": "2d"},
    "expert": {"devices": 2, "scheme": "expert"},
    "found": {"devices": 4},
    "gpipe": _pipeline("gpipe", 2),
    "1f1b": _pipeline("1f1b", 4),
    "1f1b of zero3": _pipeline("1f1b", 4, stages=2, scheme="zero3"),
    "1f1b of zero1": _pipeline("1f1b", 4, stages=2, scheme="zero1"),
    "hybrid stages": {
        "devices": 8,
        "scheme": "PP2 x HSDP 2x2 ZeRO-1",
        "micro_batches": 2,
        "stages": 2,
    },
    "interleaved": _pipeline("interleaved", 2, interleave=2),
    "interleaved of data": _pipeline(
        "interleaved", 4, stages=2, scheme="data", interleave=2, zero=0
    ),
    "zero-bubble": _pipeline("zero_bubble", 2),
    "zero-bubble of megatron": _pipeline("zero_bubble", 4, stages=2, scheme="megatron"),
    "three stages": _pipeline("1f1b", 3),
    "six ranks": _pipeline("1f1b", 6, stages=3, scheme="data"),
    "whole batch": _pipeline("gpipe", 2, count=1),
    "seven stages": _pipeline("1f1b", 7),
    "found of seven": {"devices": 7},
    "found of eight": {"devices": 8},
    "zero3 of eight": {"devices": 8, "scheme": "zero3"},
    "data x tensor x pipeline": {
        "devices": 8,
        "scheme": "pipeline-1f1b 2 x data 2 x megatron 2",
        "micro_batches": 4,
    },
}
"""What `autopar.plan` is asked for."""
_ONLY_HEADS = ("megatron", "megatron-sp", "zero-bubble of megatron", "data x tensor x pipeline")
OF_HEADS = tuple(name for name in PLANS if name != "expert")
OF_ALL = tuple(name for name in OF_HEADS if name not in _ONLY_HEADS)
OF_WHOLE_BATCHES = ("data", "2d", "found", "found of seven", "found of eight", "zero3 of eight")
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt2": OF_HEADS,
    "llama_exact": OF_HEADS,
    "bert": OF_HEADS,
    "gpt2_onnx": OF_HEADS,
    "vit": OF_HEADS,
    "encoder_decoder": OF_HEADS,
    "mixtral": (*OF_HEADS, "expert"),
    "residual_onnx": OF_ALL,
    "resnet": OF_WHOLE_BATCHES,
}
"""The models, and the plans that are made of each. Batch norms with the statistics of the batch
cannot be cut into micro-batches.
"""
WITHOUT_DROPOUT = ("gpt2_onnx", "residual_onnx", "resnet")
UNLIKE: Sequence[tuple[Sequence[tuple[int, ...]], Mapping[str, Any]]] = (
    (((2,), (2,)), {"micro_batches": 2}),
    (((2,), (1,)), {"micro_batches": 4, "pipeline": "gpipe", **_ZERO3}),
    (((1,), (2,)), {"micro_batches": 2, "pipeline": "zero_bubble", **_ZERO3}),
    (((1,), (2,), (1,)), {"micro_batches": 4, **_ZERO3}),
    (((2,), (1,)), {"micro_batches": 2, "pipeline": "interleaved", "interleave": 2, **_ZERO3}),
    (
        ((2,), (2,)),
        {"micro_batches": 2, "pipeline": "interleaved", "interleave": 2, "accumulated": "shards"},
    ),
    (((2, 2), (2,)), {"micro_batches": 2, "accumulated": "shards"}),
    (((4,), (2,)), {"micro_batches": 2, "pipeline": "zero_bubble"}),
    (((2,), (2, 2)), {"micro_batches": 2, **_ZERO3}),
    (((4,), (2, 2)), {"micro_batches": 1, "pipeline": "gpipe"}),
    (((1,), (2,)), {"micro_batches": 1, "pipeline": "gpipe"}),
)
"""Meshes of the stages and the schedule of pipelines in which everything else is chosen by chance,
for each chunk on its own.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ONNX files lie."""
    return tmp_path_factory.mktemp("models")


@functools.cache
def _subject(name: str, folder: Path, steps: int) -> Subject:
    observed = subject(
        name,
        folder,
        train=True,
        dtype="float32" if name == "mixtral" else "float64",
        steps=steps,
        dropping=True,
    )
    assert is_random(observed.model.graph) == (name not in WITHOUT_DROPOUT)
    return observed


def _planned(model: LoadedModel, name: str) -> Plan:
    """A plan of the table, read back from the text of its file."""
    wanted = PLANS[name]
    actual = plan_loaded(model, cluster="dgx-h100", **wanted).plan
    assert (
        len(actual.stages) == wanted.get("stages", 0) * wanted.get("interleave", 1)
        or "stages" not in wanted
    )
    return Plan.model_validate_json(actual.to_json())


def _by_chance(model: LoadedModel, number: int, seed: int) -> Plan:
    """A pipeline of the table of unlike stages."""
    sizes, schedule = UNLIKE[number]
    chunks = [
        (mesh, 100 * seed + part) for part, mesh in enumerate(sizes * schedule.get("interleave", 1))
    ]
    parts = [
        next(by_chance(model, mesh, schedule["micro_batches"], [own]))[1] for mesh, own in chunks
    ]
    return in_stages(model, parts, schedule)


def _require_equal(model: Subject, plans: Mapping[str, Plan]) -> None:
    """All plans give what one device gives, and issue what they are priced as."""
    results: list[str] = []
    for ranks in sorted({plan.devices for plan in plans.values()}):
        results += failures_on(
            model, ranks, [(name, plan) for name, plan in plans.items() if plan.devices == ranks]
        )
    assert not results


FAST: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("1f1b", "1f1b of zero1", "found"),
    "llama_exact": ("megatron", "zero-bubble of megatron"),
    "bert": ("zero1", "interleaved"),
    "gpt2_onnx": ("2d", "gpipe"),
    "vit": ("zero2", "interleaved of data"),
    "encoder_decoder": ("zero3", "1f1b of zero3", "zero-bubble"),
    "mixtral": ("expert", "megatron-sp"),
    "residual_onnx": ("data accumulated", "whole batch"),
    "resnet": ("data",),
}

LATER = ("bert", "vit", "gpt2_onnx")
"""Of these the rows that are slow tests."""


def test_the_tables_are_whole() -> None:
    """Every model and every plan on at most four ranks is among those that continuous integration
    runs.
    """
    assert FAST.keys() == MODELS.keys() and all(
        set(names) <= set(MODELS[name]) for name, names in FAST.items()
    )
    small = {name for name, wanted in PLANS.items() if wanted["devices"] in (2, 4)}
    assert {name for names in FAST.values() for name in names} == small


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci] * (name in LATER))
        for name in FAST
    ],
)
def test_training(name: str, folder: Path) -> None:
    """Each model and each plan at least once, three steps."""
    model = _subject(name, folder, 3)
    _require_equal(model, {plan: _planned(model.model, plan) for plan in FAST[name]})


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        pytest.param("encoder_decoder", (3, 4), marks=[pytest.mark.slow, pytest.mark.ci]),
        ("resnet", (10,)),
    ],
)
def test_unlike_stages(name: str, numbers: Sequence[int], folder: Path) -> None:
    """Tied tables on stages of other sizes, values that skip a stage, weights gathered again for
    each chunk; statistics of batches.
    """
    model = _subject(name, folder, 3)
    _require_equal(
        model, {f"unlike {number}": _by_chance(model.model, number, 0) for number in numbers}
    )


def test_a_stage_without_parameters() -> None:
    """It has nothing to update, and takes part where the others gather their weights."""
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh())
    inputs = (torch.zeros(8, 16),)
    model = load_model(module, ModelOptions(train=True), inputs)
    plan = plan_loaded(model, cluster="local-cpu", devices=2, stages=2, micro_batches=2).plan
    last = plan.stages[1].model_copy(
        update={"first": next(name for name in plan.operators if name.startswith("3/"))}
    )
    report = run_plan(model, plan.model_copy(update={"stages": (plan.stages[0], last)}), check=True)
    assert report.ok, report


PAIRS = [(name, plan) for name, plans in MODELS.items() for plan in plans]
IN_CI = random.Random(0).sample(PAIRS, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [pytest.param(*pair, marks=[pytest.mark.ci] * (pair in IN_CI)) for pair in PAIRS],
)
def test_every_model_under_every_plan(name: str, plan: str, folder: Path) -> None:
    """Ten steps."""
    model = _subject(name, folder, STEPS)
    _require_equal(model, {plan: _planned(model.model, plan)})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_by_chance(name: str, folder: Path) -> None:
    """Ten steps under plans on four ranks in which everything is chosen by chance."""
    model = _subject(name, folder, STEPS)
    count = 1 if name == "resnet" else 2
    _require_equal(model, dict(by_chance(model.model, (2, 2), count, range(2))))


UNLIKE_MODELS = (
    "gpt2",
    "bert",
    "llama_exact",
    "encoder_decoder",
    "mixtral",
    "residual_onnx",
    "vit",
)
SEEDS = [(name, seed) for name in UNLIKE_MODELS for seed in (1, 2, 3)]
SEEDS_IN_CI = (("gpt2", 1), ("encoder_decoder", 1), ("mixtral", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [pytest.param(*row, marks=[pytest.mark.ci] * (row in SEEDS_IN_CI)) for row in SEEDS],
)
def test_more_unlike_stages(name: str, seed: int, folder: Path) -> None:
    model = _subject(name, folder, 3)
    numbers = random.Random(f"{name} {seed}").sample(range(len(UNLIKE)), 3)
    _require_equal(
        model, {f"unlike {number}": _by_chance(model.model, number, seed) for number in numbers}
    )
