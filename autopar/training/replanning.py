"""A plan for the present number of devices, kept beside the checkpoints.

    FOLDER/plans/8-devices-1f2e3d4c.json   the plan for 8 devices of a model that was planned with
                                           these options

A missing plan is searched with the strategies of a plan for another number of devices: an operator
is split on every axis of the new mesh by a factor that some axis of the old mesh split, wherever
that divides. Stages, micro-batches and recomputation stay, too. If no such plan fits the memory,
the search is free.
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

from autopar.api import plan_loaded
from autopar.errors import NoPlanFits, PlanError, UsageError
from autopar.ir import Graph
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.planning.model.pins import Restriction
from autopar.planning.model.restrictions import Limits
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.mesh import Mesh
from autopar.sharding.strategies import Strategies

PLANS = "plans"
_NAME = re.compile(r"(\d+)-devices-([0-9a-f]{8})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A plan, and in words where it is from; `seconds` that finding it took."""

    plan: Plan
    origin: str
    seconds: float


def plan_for(
    model: LoadedModel, devices: int, folder: Path, options: Mapping[str, Any]
) -> Replanned:
    """The plan of a model for `devices` devices.

    It is an earlier one, one adapted from the nearest number of devices, or a new one.

    `folder`: of the checkpoints. `options`: those of `autopar.planning`, as `plan_loaded` takes
    them.
    """
    began = time.perf_counter()
    held = _Held(folder / PLANS, _key(options), model)
    plan = held.plan(devices)
    origin = "planned before"
    if plan is None:
        plan, origin = _searched(model, devices, held, options)
        held.folder.mkdir(parents=True, exist_ok=True)
        plan.save(held.path(devices))
    return Replanned(plan=plan, origin=origin, seconds=time.perf_counter() - began)


def _key(options: Mapping[str, Any]) -> str:
    """A digest of the options, which distinguish plans of one model and number of devices."""
    return hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:8]


class _Held:
    """Earlier plans for this very model, by number of devices; a damaged file counts as absent.

    Each is read when asked for, since reading the plans of large models takes as long as some
    searches.
    """

    def __init__(self, folder: Path, key: str, model: LoadedModel) -> None:
        self.folder = folder
        self.key = key
        self.model = model

    def path(self, devices: int) -> Path:
        """The path of the plan for `devices` devices."""
        return self.folder / f"{devices}-devices-{self.key}.json"

    def plan(self, devices: int) -> Plan | None:
        """The plan for so many devices, if there is one."""
        try:
            plan = Plan.load(self.path(devices)) if self.path(devices).is_file() else None
        except PlanError:
            return None
        return None if plan is None or plan.differences(self.model.graph) else plan

    def nearest(self, devices: int) -> tuple[int, Plan] | None:
        """The number nearest to this one for which there is a plan, and the plan."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.glob("*-devices-*.json"))
        numbers = (int(match[1]) for match in matches if match is not None and match[2] == self.key)
        for number in sorted(numbers, key=lambda number: (abs(number - devices), number)):
            if (plan := self.plan(number)) is not None:
                return number, plan
        return None


def _searched(
    model: LoadedModel, devices: int, held: _Held, options: Mapping[str, Any]
) -> tuple[Plan, str]:
    """A plan for all devices, or for the most of them that the fixed options (a scheme, say) allow.

    More than half of the present devices must do.
    """
    refused: UsageError | None = None
    for count in range(devices, devices // 2, -1):
        try:
            return _found(model, count, held, options)
        except UsageError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _found(
    model: LoadedModel, devices: int, held: _Held, options: Mapping[str, Any]
) -> tuple[Plan, str]:
    near = held.nearest(devices) if devices > 1 else None  # one device splits nothing
    if near is not None:
        # Fewer devices may need to save memory, and other numbers may not divide by the kept
        # strategies.
        with contextlib.suppress(NoPlanFits, UsageError):
            return _keeping(
                near[1], model, devices, options
            ), f"planned with the strategies for {near[0]} devices"
    return plan_loaded(model, devices=devices, **options).plan, "planned anew"


def _keeping(old: Plan, model: LoadedModel, devices: int, options: Mapping[str, Any]) -> Plan:
    train = old.model.mode == "train"
    schedule = old.schedule
    stages = max(1, len(old.stages) // old.schedule.interleave)
    fixed: dict[str, Any] = {
        "stages": stages if devices % stages == 0 else None,
        "recompute": None if schedule.recompute else "none",
    }
    if train:
        fixed["micro_batches"] = schedule.micro_batches
    given = {name: value for name, value in fixed.items() if options.get(name) is None}
    pins = keeping(old, model.graph)
    return plan_loaded(model, devices=devices, pins=pins, **{**options, **given}).plan


def keeping(plan: Plan, graph: Graph) -> Restriction:
    """A restriction of each unchanged operator to the factors that the plan splits.

    It holds on any mesh on which these factors divide.
    """
    names = {op.name: op for op in graph.operators}
    same = ((name, op) for name, op in plan.operators.items() if name in names)
    wanted = {
        name: frozenset(op.strategy)
        for name, op in same
        if graph.operator_fingerprint(names[name]) == op.fingerprint
    }

    def restriction(analysis: Analysis, mesh: Mesh) -> Limits:
        def strategies(name: str, offer: Offer, candidates: Strategies) -> NDArray[np.bool_]:
            if name not in wanted:
                return np.ones(len(candidates.choices), dtype=bool)
            is_wanted = np.array(
                [option.name in wanted[name] for option in offer.options], dtype=bool
            )
            allowed: NDArray[np.bool_] = np.all(is_wanted[candidates.choices], axis=1)
            return allowed if allowed.any() else np.ones(len(allowed), dtype=bool)

        return Limits(strategies=strategies)

    return restriction
