"""How a script gets its module: the original one, or the same under a plan; plans are made once in
the process that starts the ranks.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import autopar
from autopar.api import plan_loaded
from autopar.errors import AutoparError
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.plan import Plan
from tests.end_to_end.scripts.models import KINDS
from tests.end_to_end.scripts.table import Make

RANKS = 2
ONE_RANK = "one rank"
SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "data": {"scheme": "data"},
    "megatron": {"scheme": "megatron"},
    "zero3": {"scheme": "zero3"},
    "pipeline": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
    "micro-batches": {"scheme": "zero3", "micro_batches": 2},
    "search": {},
    "zero1": {"scheme": "zero1"},
    "zero2": {"scheme": "zero2"},
    "tensor": {"scheme": "tensor"},
    "megatron-sp": {"scheme": "megatron-sp"},
    "pipeline-gpipe": {"stages": 2, "micro_batches": 4, "schedule": "gpipe"},
    ONE_RANK: {"devices": 1},
}
"""What `autopar.plan` is asked for."""
FILE = "language, from its file"
OTHER = "language, another plan on rank 1"
"""Kinds of modules beside those of the models: planned from the name of a plan's file, and with a
wrong plan.
"""


@functools.cache
def loaded(kind: str) -> LoadedModel:
    """A model of a kind as the planner takes it."""
    return load_model(KINDS[kind].made(0), ModelOptions(train=True), KINDS[kind].inputs)


@functools.cache
def plan_of(kind: str, scheme: str) -> Plan | AutoparError:
    """The plan of a model, read back from the text of its file, or why there is none."""
    try:
        result = plan_loaded(
            loaded(kind), cluster="local-cpu", **{"devices": RANKS, **SCHEMES[scheme]}
        ).plan
    except AutoparError as error:
        return error
    return Plan.model_validate_json(result.to_json())


def prepare(scheme: str) -> None:
    """Make all plans of a scheme, before ranks are forked."""
    for kind in KINDS:
        plan_of(kind, scheme)


def original(
    kind: str = "language", *, seed: int = 0, change: Callable[[nn.Module], object] | None = None
) -> nn.Module:
    """The module without a plan."""
    module = KINDS[kind.partition(",")[0]].made(seed)
    if change is not None:
        change(module)
    return module


def planned(scheme: str) -> Make:
    """Makes modules under the plans of a scheme."""

    def make(
        kind: str = "language",
        *,
        seed: int = 0,
        change: Callable[[nn.Module], object] | None = None,
    ) -> nn.Module:
        used = "megatron" if scheme == "data" else "data"
        plan = plan_of(
            kind.partition(",")[0], used if kind == OTHER and dist.get_rank() else scheme
        )
        if isinstance(plan, AutoparError):
            raise plan
        module = original(kind, seed=seed, change=change)
        if kind == FILE:
            return _from_file(module, plan)
        if change is not None:
            return autopar.parallelize(module, plan)
        return autopar.parallelize(
            replace(loaded(kind.partition(",")[0]), build=lambda: module), plan
        )

    return make


def _from_file(module: nn.Module, plan: Plan) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{os.getpid()}.plan.json")
        plan.save(path)
        return autopar.parallelize(module, path)
