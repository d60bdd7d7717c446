"""Runs of a plan on ranks: timed steps, or steps that are checked against one device."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import RunError
from autopar.model import LoadedModel, checks_by_default
from autopar.order.execution import Execution
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from autopar.sharding.matrices import MUON

from .checking import Observation, Report, differences, observe
from .checking.check import planned_optimizer
from .checking.first_step import check_first_step
from .checking.reference import exact, reference_observation
from .execution.collective_log import CollectiveLog
from .files.module_weights import fill_module
from .launch import forked_on, in_steps, launched, require_backend, run_ranks
from .models.example_inputs import with_values
from .models.model_values import model_values
from .module.held_shards import Values
from .module.parallel_module import ModuleOptions, ParallelModule
from .parallelize import join_world
from .profiling.profile import profile
from .profiling.rows import together
from .ranks.world import World

TIMEOUT = 1800.0
"""Seconds that a run on forked ranks may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report of a run.

    `seconds`: of a median step. `losses`: of every step. `check`: the result of the check, if any.
    """

    ranks: int
    mesh: str
    backend: str
    steps: int
    seconds: float
    losses: tuple[float, ...]
    collectives: str
    check: str
    ok: bool
    profile: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The job of every rank.

    `profile`: the trace file of the first rank, for its steps after the first; other stages write
    next to it.
    """

    model: LoadedModel
    plan: Plan
    inputs: tuple[Tensor, ...]
    steps: int
    check: bool
    seed: int
    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A rank's report; `observed` on rank 0 of a check."""

    seconds: float
    losses: tuple[float, ...]
    issued: int
    mismatch: str
    observed: Observation | None
    profile: dict[str, Any] | None = None


def run_plan(
    model: LoadedModel,
    plan: Plan,
    *,
    steps: int = 1,
    check: bool = False,
    backend: str | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    profile: str | Path | None = None,
) -> RunReport:
    """Run a plan on ranks: those of `torchrun` if this process is one, else forked Gloo ranks.

    `backend`: gloo or nccl; strict is Gloo on forked ranks that are held to the rules of NCCL.
    `check`: compare outputs, gradients and updated weights with one device, and each rank's
    collectives with the priced ones. `weights`: files to read instead of a PyTorch model's own
    weights. `profile`: measure the steps of the first rank of each stage, and write their traces
    there (`stage_trace`).
    """
    if steps < 1:
        raise RunError(f"a run has at least 1 step, not {steps}")
    # Refuses what cannot be run before any rank starts.
    plan.execution(analyse(model.graph, train=plan.model.mode == "train"))
    model = with_values(model, seed)
    assert model.inputs is not None
    trace = Path(profile).absolute() if profile else None
    job = _Job(
        model=model,
        plan=plan,
        inputs=model.inputs,
        steps=steps,
        check=check,
        seed=seed,
        profile=trace,
    )
    if launched() is not None:
        return _on_launched_ranks(job, backend, weights)
    if backend == "nccl":
        require_backend(backend)
        raise RunError(
            "nccl ranks are started by torchrun: torchrun --nproc-per-node "
            f"{plan.devices} -m autopar run PLAN --model MODEL --backend nccl"
        )
    values = _values(job, weights)
    cpu = torch.device("cpu")
    with forked_on(backend) as name:
        results = run_ranks(_run_rank, plan.devices, job, cpu, values, timeout=TIMEOUT)
    return _report(job, results, name, _compare(job, results[0]))


def _values(job: _Job, weights: str | Path | None) -> Values:
    """The values to run with.

    A check needs the model's own weights to be equal, before and after their cast.
    """
    values = model_values(job.model, job.plan.schedule.types, weights=weights)
    if weights is not None and job.check:
        if job.model.given is not None:
            fill_module(job.model.given, values)
        fill_module(job.model.module, model_values(job.model, weights=weights))
    return values


def _on_launched_ranks(job: _Job, backend: str | None, weights: str | Path | None) -> RunReport:
    """This process is one rank: take part, and learn the outcome that rank 0 finds."""
    device = join_world(job.plan, backend)
    mine = _run_rank(job, device, _values(job, weights))
    results: list[Any] = [None] * dist.get_world_size()
    # Observations hold whole gradients and weights, which only rank 0 compares.
    dist.all_gather_object(results, replace(mine, observed=None))
    outcome = [
        _report(job, results, dist.get_backend(), _compare(job, mine))
        if dist.get_rank() == 0
        else None
    ]
    # Every rank returns the report, not only the one that made it.
    dist.broadcast_object_list(outcome, src=0)
    assert outcome[0] is not None
    return outcome[0]


def _run_rank(job: _Job, device: torch.device, values: Values) -> _Result:
    """One rank: with a check the observed steps, else timed ones."""
    program = job.plan.execution(analyse(job.model.graph, train=job.plan.model.mode == "train"))
    module = ParallelModule(
        program,
        World.of(program),
        values,
        options=ModuleOptions(device=device, exact_random=job.check and exact(job.model, job.plan)),
    )
    module.engine.plan = job.plan
    inputs = [value.to(device) for value in job.inputs]
    if not job.check:
        world = module.engine.world
        checked = checks_by_default()
        said = check_first_step(job.model, job.plan, world, values, device) if checked else ""
        if said and world.rank == 0:
            print(f"autopar: {said}", file=sys.stderr)
        losses, seconds, measured = _timed(module, inputs, job)
        return _Result(
            seconds=seconds, losses=losses, issued=0, mismatch="", observed=None, profile=measured
        )
    mismatch, issued = _collectives(module, program, inputs, job.plan.model.optimizer)
    start = time.perf_counter()
    observed = observe(
        module, inputs, optimizer=job.plan.model.optimizer, steps=job.steps, seed=job.seed
    )
    seconds = (time.perf_counter() - start) / job.steps
    return _Result(
        seconds=seconds,
        losses=observed.losses,
        issued=issued,
        mismatch=mismatch,
        observed=observed if dist.get_rank() == 0 else None,
    )


def _timed(
    module: ParallelModule, inputs: Sequence[Tensor], job: _Job
) -> tuple[tuple[float, ...], float, dict[str, Any] | None]:
    """Losses of the steps, the median seconds of one, and measurements of the stage, if wanted."""
    torch.manual_seed(job.seed)
    stepper = planned_optimizer(job.plan.model.optimizer, module)
    losses = []
    times = []
    world = module.engine.world
    measured = profile(module) if job.profile is not None and world.rank in world.firsts else None
    with contextlib.ExitStack() as watched:
        for number in in_steps(job.steps):
            # The first step compiles and allocates, so it is left out of the profile.
            if measured is not None and number == 1:
                watched.enter_context(measured)
            start = time.perf_counter()
            if module.loss_index is None:
                with torch.no_grad():
                    module(*inputs)
            else:
                loss = module.loss(*inputs)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(float(loss.detach()))
                if stepper is not None:
                    stepper.step()
                module.zero_grad()
            times.append(time.perf_counter() - start)
    if measured is None:
        return tuple(losses), statistics.median(times), None
    assert job.profile is not None
    measured.save_trace(stage_trace(job.profile, measured.stage))
    return tuple(losses), statistics.median(times), measured.json()


def stage_trace(path: Path, stage: int | None) -> Path:
    """The trace file of a stage: `path` for the first, files next to it for others.

    >>> stage_trace(Path("trace.json"), 2).name
    'trace-stage-2.json'
    """
    return path.with_name(f"{path.stem}-stage-{stage}{path.suffix}") if stage else path


def _collectives(
    module: ParallelModule, program: Execution, inputs: Sequence[Tensor], optimizer: str
) -> tuple[str, int]:
    """Differences between priced and issued collectives of a step, and how many were issued."""
    with CollectiveLog() as log:
        outputs = module(*inputs)
        if module.loss_index is not None:
            outputs[module.loss_index].backward()
        if optimizer == MUON and (stepper := planned_optimizer(optimizer, module)) is not None:
            # Its collectives are those of the step; at this rate no weight changes.
            for group in stepper.param_groups:
                group["lr"] = 0.0
            stepper.step()
    module.zero_grad()
    return log.mismatch(program, dist.get_rank()), len(log.issued)


def _compare(job: _Job, result: _Result) -> Report | None:
    """The same steps of the original model on one device, and the differences."""
    if result.observed is None:
        return None
    reference = functools.partial(
        reference_observation, job.model, job.plan, job.inputs, steps=job.steps, seed=job.seed
    )
    return differences(
        reference(),
        result.observed,
        graph=job.model.graph,
        optimizer=job.plan.model.optimizer,
        # A module of torch has been trained in place by then.
        perturbed=None if job.model.torch else lambda: reference(nudge=True),
    )


def _report(
    job: _Job, results: Sequence[_Result], backend: str, report: Report | None
) -> RunReport:
    mismatches = [f"rank {i}: {r.mismatch}" for i, r in enumerate(results) if r.mismatch]
    collectives = "; ".join(mismatches[:2]) or f"{results[0].issued} in a step, as priced"
    return RunReport(
        ranks=job.plan.devices,
        mesh=str(job.plan.mesh_),
        backend=backend,
        steps=job.steps,
        seconds=statistics.median(r.seconds for r in results),
        losses=results[0].losses,
        collectives=collectives if job.check else "not compared",
        check=str(report) if report else "not made",
        ok=not mismatches and (report is None or report.passed),
        profile=together([result.profile for result in results if result.profile is not None]),
    )
