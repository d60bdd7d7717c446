"""Written configurations read back and planned again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from autopar.errors import AutoparError
from autopar.integrations.convert import Converted
from autopar.integrations.convert.stage_layers import stage_layers
from autopar.integrations.importing import Hardware, import_configuration, read_configuration
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.plan_parts import ReductionsPlan
from autopar.sharding.schedule import UNIT_BYTES

SUFFIXES: Mapping[str, str] = {
    "torchtitan": ".py",
    "megatron": ".sh",
    "megatron-bridge": ".py",
    "deepspeed": ".json",
    "transformers": ".py",
    "accelerate": ".yaml",
}
"""The names of the files of formats that are read."""


def read_back(
    plan: Plan, converted: Converted, target: str, model: LoadedModel, hardware: Hardware
) -> str:
    """Say how a plan comes back from its conversion.

    "same" if the same plan comes back, "named" if another does and the losses are named, else
    "another", which is a fault.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan{SUFFIXES[target]}"
        path.write_text(converted.text)
        read = read_configuration(path, target)
    try:
        back = import_configuration(read, model, hardware, compare=False).planned.plan
    except AutoparError as error:
        return f"refused: {error}"
    if _said(back) == _said(plan):
        return "same"
    return "named" if converted.lost or read.lost else "another"


def _said(plan: Plan) -> tuple[object, ...]:
    """The parts of a plan that a configuration says; of its stages, which layers they hold."""
    stages = stage_layers(plan) or plan.stages
    # The units in which parameters travel are habits of who runs the plan.
    units = {"reductions": ReductionsPlan(), "unit_bytes": UNIT_BYTES}
    schedule = plan.schedule.model_copy(update=units)
    return [axis.size for axis in plan.mesh], plan.operators, schedule, stages
