"""A plan of each model for each target, and what becomes of its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.api import plan_loaded
from autopar.costmodel import load_cluster
from autopar.costmodel.frameworks import framework_of
from autopar.errors import AutoparError
from autopar.frontends.load import ModelOptions, load_model
from autopar.integrations.convert import TARGETS, Converted, convert, setup_of
from autopar.integrations.importing import Hardware
from autopar.model import LoadedModel
from autopar.plan import Plan

from .executed import TARGETS as EXECUTED
from .executed import difference, executed
from .models import build
from .read_back import read_back

MOST = 1e-4
"""The largest share by which outputs and gradients in float32 differ from those of one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model's plan within what a target can say, on all devices.

    `outcome`: "runs" (torch or transformers run the file on all ranks, with the outputs and
    gradients of one device), "same" (the file is read back as the plan), "named" (it is read back
    as another, and what it leaves out is told), "refused", or "fails", with `why`. `slower`: the
    predicted step over that of any plan that the target's framework would run, less 1. `lost`: what
    the file leaves out.
    """

    model: str
    target: str
    outcome: str
    why: str = ""
    mesh: str = ""
    slower: float = 0.0
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The plans of one model, stored in a folder if there is one, from where they are taken."""

    name: str
    model: LoadedModel
    given: Mapping[str, Any]
    folder: Path | None = None

    def plan(self, target: str, *, within: bool = True) -> Plan:
        """The plan that a target runs on all devices; `within`: what it can say, else any."""
        name = f"{self.name}--{target}{'' if within else '--free'}.json"
        path = self.folder / name if self.folder else None
        if path is not None and path.exists():
            return Plan.load(path)
        given = dict(self.given)
        if within:
            given["target"] = target
        else:
            cluster = load_cluster(given["cluster"]).sized(given.pop("devices"))
            given["cluster"] = cluster.run_by(framework_of(target))
        plan = plan_loaded(self.model, **given, fewer=False).plan
        if path is not None:
            path.write_text(plan.to_json())
        return plan


def cells(
    models: Sequence[str], given: Mapping[str, Any], folder: Path | None = None
) -> Iterator[Cell]:
    """The cells of a table; `given`: the hardware."""
    for name in models:
        module, inputs = build(name)
        model = load_model(module, ModelOptions(), inputs)
        planner = Planner(name=name, model=model, given=given, folder=folder)
        for target in TARGETS:
            try:
                plan = planner.plan(target)
                converted = convert(plan, target)
            except AutoparError as error:
                why = (
                    str(error).splitlines()[0].removeprefix(f"{target} cannot express this plan: ")
                )
                yield Cell(model=name, target=target, outcome="refused", why=why)
                continue
            outcome, why = _outcome(planner, target, plan, converted)
            free = planner.plan(target, within=False).predicted.step
            yield Cell(
                model=name,
                target=target,
                outcome=outcome,
                why=why,
                mesh=_mesh(plan),
                slower=plan.predicted.step / free - 1,
                lost=converted.lost,
            )


def _mesh(plan: Plan) -> str:
    """The axes of a plan, its stages first, such as "2 stages x data 2"."""
    stages = setup_of(plan).stages
    axes = [f"{axis.name} {axis.size}" for axis in plan.mesh if axis.size > 1]
    return " x ".join([*([f"{stages} stages"] if stages > 1 else []), *axes])


def _outcome(planner: Planner, target: str, plan: Plan, converted: Converted) -> tuple[str, str]:
    """The outcome of a file, and the reason of one that fails."""
    try:
        if target in EXECUTED:
            gap = difference(executed(planner.name, target, converted.text, plan))
            return ("runs", "") if gap < MOST else ("fails", f"it differs by {gap:.1e}")
        hardware = Hardware(**planner.given)
        back = read_back(plan, converted, target, planner.model, hardware)
    except (AutoparError, SyntaxError, ImportError, ValueError, TypeError) as error:
        return "fails", str(error).strip().splitlines()[-1]
    if back in ("same", "named"):
        return back, ""
    return "fails", "it is read back as another plan, untold" if back == "another" else back
