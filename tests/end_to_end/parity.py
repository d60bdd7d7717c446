"""Many plans of one model on one set of real ranks, each against one device and against its own
list of collectives.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist

from autopar.model import LoadedModel
from autopar.order.execution import Execution
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.runtime.checking import Observation, differences, observe
from autopar.runtime.checking.check import one_device
from autopar.runtime.checking.reference import reference_observation
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.local_forms.randomness import is_random
from autopar.runtime.models.example_inputs import example_values
from autopar.runtime.models.model_values import model_values
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.optimizers import Muon
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.world import World
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.matrices import MUON
from tests.end_to_end.models import FLOAT32_INSIDE, load
from tests.end_to_end.plans import NamedPlans, request

STEPS = 3
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
LEFT_OUT = {1e-9: 0.05, 1e-5: 0.6}
"""By tolerance: the largest share of weight elements that may be left out in three steps: AdamW
divides a gradient by its own size.

In float32 that leaves out many (no gradient is left out); in float64 hardly any.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with the figures of one device, ready to be compared with any plan."""

    model: LoadedModel
    train: bool
    steps: int
    inputs: tuple[torch.Tensor, ...]
    values: Mapping[str, Any]
    reference: Observation
    tolerance: float
    optimizer: str = "adamw"


class How(TypedDict, total=False):
    """Whether a model drops values, and the optimizer of its training (AdamW by default)."""

    dropping: bool
    optimizer: str


def subject(
    name: str,
    folder: Path,
    *,
    train: bool,
    dtype: str = "float64",
    steps: int = STEPS,
    **how: Unpack[How],
) -> Subject:
    """Load a model and run it on one device: some steps in training, its outputs in inference.

    Of a model with dropout one device draws what any plan draws: it runs the graph on one rank.
    """
    dropping = how.get("dropping", False)
    optimizer = how.get("optimizer", "adamw")
    model = load(name, folder, train=train, dtype=dtype, dropping=dropping)
    assert dropping or not is_random(model.graph)
    inputs = tuple(model.inputs) if model.inputs is not None else example_values(model.graph)
    twin = copy.deepcopy(model.module)
    alone = replace(model, build=lambda: twin)
    if is_random(model.graph):
        program = one_device(model.graph, analyse(model.graph, train=train).gradients)
        observed = observe(
            ParallelModule(program, DeviceGroups.single(), model_values(alone)),
            inputs,
            optimizer=optimizer,
            steps=steps,
        )
    else:
        observed = reference_observation(
            alone, _any_plan(model, train, optimizer), inputs, steps=steps if train else 1, seed=0
        )
    tolerance = TOLERANCE["float32" if name in FLOAT32_INSIDE else dtype]
    values = model_values(model)
    return Subject(
        model=model,
        train=train,
        steps=steps,
        inputs=inputs,
        values=values,
        reference=observed,
        tolerance=tolerance,
        optimizer=optimizer,
    )


def _any_plan(model: LoadedModel, train: bool, optimizer: str) -> Plan:
    return NamedPlans(model, request((1,), train=train, optimizer=optimizer))["found"]


def failures(subject: Subject, wanted: Request, named: Sequence[tuple[str, Plan]]) -> list[str]:
    """The errors of these plans on real ranks of their mesh, in words; empty where all is right."""
    assert wanted.mesh is not None
    return failures_on(subject, wanted.mesh.devices, named)


def failures_on(subject: Subject, ranks: int, named: Sequence[tuple[str, Plan]]) -> list[str]:
    """The same on so many ranks, of which a plan may leave some idle."""
    analysis = analyse(subject.model.graph, train=subject.train)
    results = run_ranks(_on_rank, ranks, subject, analysis, named, timeout=540.0)
    actual: list[str] = []
    for number, (name, plan) in enumerate(named):
        sizes = [stage.mesh for stage in plan.stages] or [plan.mesh]
        mesh = " + ".join("x".join(str(axis.size) for axis in axes) for axes in sizes)
        where = (
            f"{subject.model.graph.name} {'training' if subject.train else 'inference'} on {mesh}, "
            f"{name}"
        )
        wrong = [
            f"{where}: rank {rank}: {result[number][1]}"
            for rank, result in enumerate(results)
            if result[number][1]
        ]
        actual += wrong[:1] or _unequal(subject, results[0][number][0], where)
    return actual


def _unequal(subject: Subject, observed: Observation | None, where: str) -> list[str]:
    assert observed is not None
    graph = subject.model.graph
    report = differences(
        subject.reference,
        observed,
        graph=graph,
        optimizer=subject.optimizer if subject.train else "none",
    )
    kinds = {entry.what for entry in report.entries}
    assert kinds == ({"output", "loss", "gradient", "weight"} if subject.train else {"output"}), (
        kinds
    )
    assert {e.tolerance for e in report.entries} <= {subject.tolerance, 1e-300}, (
        "the check is looser than the test asks for"
    )
    elements = sum(entry.elements for entry in report.entries if entry.what == "weight")
    kept = (1 - LEFT_OUT[subject.tolerance]) ** (subject.steps / STEPS)
    if report.excluded > (1 - kept) * elements:
        return [f"{where}: {report.excluded} of {elements} elements of weights are left out"]
    return [] if report.passed else [f"{where}: {report}"]


def _on_rank(
    subject: Subject, analysis: Analysis, named: Sequence[tuple[str, Plan]]
) -> list[tuple[Observation | None, str]]:
    """On one rank: what rank 0 observes of every plan, and what is wrong with its collectives."""
    results = []
    for name, plan in named:
        try:
            results.append(_observed(subject, plan.execution(analysis)))
        except Exception as error:
            raise RuntimeError(f"plan {name}: {traceback.format_exc()}") from error
    return results


def _observed(subject: Subject, program: Execution) -> tuple[Observation | None, str]:
    module = ParallelModule(program, World.of(program), subject.values)
    with CollectiveLog() as log, torch.set_grad_enabled(subject.train):
        outputs = module(*subject.inputs)
        if module.loss_index is not None:
            outputs[module.loss_index].backward()
            if subject.optimizer == MUON:
                # Its collectives are those of the step; no weight changes.
                Muon(module, lr=0.0).step()
    module.zero_grad()
    seen = observe(
        module,
        subject.inputs,
        optimizer=subject.optimizer if subject.train else "none",
        steps=subject.steps if subject.train else 1,
    )
    rank = dist.get_rank()
    return seen if rank == 0 else None, log.mismatch(program, rank)
