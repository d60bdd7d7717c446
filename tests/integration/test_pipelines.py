"""Every kind of model under every kind of plan, pipelines above all: losses and weights of one device, and a log that equals the order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.api import plan_loaded
from autopar.model import LoadedModel
from autopar.plan import Plan

from .parity import Subject, subject

STEPS = 10


def _pipeline(schedule: str, ranks: int, *, stages: int = 0, count: int = 4, **more: Any) -> dict[str, Any]:
    """Stages of equal size under a schedule."""
    return {"devices": ranks, "stages": stages or ranks, "micro_batches": count, "schedule": schedule, "interleave": 1} | more


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
    "interleaved": _pipeline("interleaved", 2, interleave=2),
    "interleaved of data": _pipeline("interleaved", 4, stages=2, scheme="data", interleave=2, zero=0),
    "zero-bubble": _pipeline("zero_bubble", 2),
    "zero-bubble of megatron": _pipeline("zero_bubble", 4, stages=2, scheme="megatron"),
    "three stages": _pipeline("1f1b", 3),
    "six ranks": _pipeline("1f1b", 6, stages=3, scheme="data"),
    "data x tensor x pipeline": {"devices": 8, "scheme": "pipeline-1f1b 2 x data 2 x megatron 2", "micro_batches": 4},
}  # fmt: skip
"""What `autopar.plan` is asked for."""
OF_ALL = tuple(name for name in PLANS if name not in ("megatron", "megatron-sp", "2d", "expert", "zero-bubble of megatron",
               "data x tensor x pipeline"))  # fmt: skip
OF_HEADS = tuple(name for name in PLANS if name != "expert")
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt2": OF_HEADS, "llama_exact": OF_HEADS, "bert": OF_HEADS, "vit": OF_HEADS, "encoder_decoder": OF_HEADS,
    "mixtral": tuple(PLANS), "resnet": OF_ALL, "residual_onnx": OF_ALL, "gpt2_onnx": OF_HEADS,
}  # fmt: skip
"""The models, and the plans that are made of each; by hand are made those of unlike stages, and by chance others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ONNX files lie."""
    return tmp_path_factory.mktemp("models")


@functools.cache
def _subject(name: str, folder: Path, steps: int) -> Subject:
    return subject(name, folder, train=True, dtype="float32" if name == "mixtral" else "float64", steps=steps)


def _planned(model: LoadedModel, name: str) -> Plan:
    """A plan of the table, read back from the text of its file."""
    wanted = dict(PLANS[name])
    found = plan_loaded(model, cluster="dgx-h100", **wanted).plan
    assert len(found.stages) == wanted.get("stages", len(found.stages)) * wanted.get("interleave", 1)
    return Plan.model_validate_json(found.to_json())
