"""A plan for the devices that are there, kept by their number beside the checkpoints, so that it is searched once.

FOLDER/plans/8-devices-1f2e3d4c.json   the plan for 8 devices of a model that was planned with these options

Where there is none for this number of devices, one is searched that keeps the strategies of a plan for another number: an operator is
split on every axis of the new mesh by what some axis of the old mesh split it by, wherever that divides. Stages, micro-batches and what is
recomputed stay, too. Where no such plan fits the memory, the search is free.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import plan_loaded
from ..errors import NoPlanFits, PlanError, UsageError
from ..model import LoadedModel
from ..plan import Plan
from ..planning.limits import Limits
from ..planning.pins import Restriction
from ..sharding.analysis import Analysis, Offer, analyse
from ..sharding.candidates import Strategies
from ..sharding.mesh import Mesh

PLANS = "plans"
_NAME = re.compile(r"(\d+)-devices-([0-9a-f]{8})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A plan, and in words where it is from; `seconds` that finding it took."""

    plan: Plan
    origin: str
    seconds: float


def plan_for(model: LoadedModel, devices: int, folder: Path, options: Mapping[str, Any]) -> Replanned:
    """The plan of a model for so many devices: that of before, or one that keeps the strategies of the nearest, or a new one.

    `folder`: of the checkpoints. `options`: those of `autopar.planning`, as `plan_loaded` takes them.
    """
    began = time.perf_counter()
    key = _key(options)
    held = _held(folder / PLANS, key, model)
    if devices in held:
        plan, origin = held[devices], "planned before"
    else:
        plan, origin = _searched(model, devices, held, options)
        (folder / PLANS).mkdir(parents=True, exist_ok=True)
        plan.save(folder / PLANS / f"{devices}-devices-{key}.json")
    return Replanned(plan=plan, origin=origin, seconds=time.perf_counter() - began)


def _key(options: Mapping[str, Any]) -> str:
    """Of everything that makes it another plan, beside model and devices."""
    return hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:8]


def _held(folder: Path, key: str, model: LoadedModel) -> dict[int, Plan]:
    """The plans of before that are for this very model, by number of devices; what is damaged is as good as absent."""
    found = {}
    for path in sorted(folder.glob("*-devices-*.json")):
        match = _NAME.fullmatch(path.name)
        if match is None or match[2] != key:
            continue
        try:
            plan = Plan.load(path)
        except PlanError:
            continue
        if not plan.differences(model.graph):
            found[int(match[1])] = plan
    return found


def _searched(model: LoadedModel, devices: int, held: Mapping[int, Plan], options: Mapping[str, Any]) -> tuple[Plan, str]:
    """A plan for all devices, or for as many of them as what is fixed (a scheme, say) can be split over: more than half."""
    refused: UsageError | None = None
    for count in range(devices, devices // 2, -1):
        try:
            return _found(model, count, held, options)
        except UsageError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _found(model: LoadedModel, devices: int, held: Mapping[int, Plan], options: Mapping[str, Any]) -> tuple[Plan, str]:
    if held and devices > 1:  # one device splits nothing
        near = min(held, key=lambda number: (abs(number - devices), number))
        # Fewer devices may need what saves memory, and others may divide nothing by what was kept.
        with contextlib.suppress(NoPlanFits, UsageError):
            return _keeping(held[near], model, devices, options), f"planned with the strategies for {near} devices"
    return plan_loaded(model, devices=devices, **options).plan, "planned anew"


def _keeping(old: Plan, model: LoadedModel, devices: int, options: Mapping[str, Any]) -> Plan:
    train = old.model.mode == "train"
    schedule, stages = old.schedule, max(1, len(old.stages) // old.schedule.interleave)
    fixed: dict[str, Any] = {"stages": stages if devices % stages == 0 else None, "recompute": None if schedule.recompute else "none"}
    if train:
        fixed["micro_batches"] = schedule.micro_batches
    given = {name: value for name, value in fixed.items() if options.get(name) is None}
    pins = keeping(old, analyse(model.graph, train=train))
    return plan_loaded(model, devices=devices, pins=pins, **{**options, **given}).plan


def keeping(plan: Plan, analysis: Analysis) -> Restriction:
    """Each operator that the model still holds is split by what the plan splits it by, on a mesh of any axes, where that divides."""
    prints = {op.name: analysis.graph.operator_fingerprint(op) for op in analysis.warm}
    wanted = {name: {*op.strategy} for name, op in plan.operators.items() if prints.get(name) == op.fingerprint}

    def restriction(analysis: Analysis, mesh: Mesh) -> Limits:
        def strategies(name: str, offer: Offer, found: Strategies) -> NDArray[np.bool_]:
            names = wanted.get(name)
            if names is None:
                return np.ones(len(found.choices), dtype=bool)
            places = [place for place, option in enumerate(offer.options) if option.name in names]
            allowed: NDArray[np.bool_] = np.all(np.isin(found.choices, places), axis=1)
            return allowed if allowed.any() else np.ones(len(allowed), dtype=bool)

        return Limits(strategies=strategies)

    return restriction
