"""The check of a plan's first step: its order on the ranks against one undivided pass.

    loss and gradients of the planned order      = those of the same graph on one device
    (micro-batches, stages, ZeRO, reductions)      in one pass of the same samples

It runs on drawn inputs, one sample for each part into which the plan cuts the batch, and short
sequences, as far as every operator keeps its strategy at these sizes. Where the model does not fit
a second time, equal layers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, PlanError, RunError
from autopar.forking import free_garbage
from autopar.ir import Graph, Role
from autopar.ir.recipes import recipe_in
from autopar.model import LoadedModel
from autopar.order.execution import Execution
from autopar.plan import Plan
from autopar.runtime.local_forms.randomness import is_random
from autopar.runtime.models.example_inputs import with_values
from autopar.runtime.models.graph_run import last_uses, run_operators
from autopar.runtime.models.small_copies import cut_call, leave_out_equal, lengths_of, twin_of
from autopar.runtime.module.held_shards import Values
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.module.plan_sizes import as_planned_at
from autopar.runtime.ranks.agreement import first_rank_says
from autopar.runtime.ranks.world import World
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import S, parse_layout
from autopar.sharding.rules.modes import evaluated

from .check import observe
from .differences import Observation, Report, differences, nudged

TIMES = 5
"""Parameters' bytes of a check: the model and its gradients, whole, planned, and on their way."""
LENGTH = 8
"""Tokens of a sequence for each device of a mesh, which may split it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step to check: a model at small sizes with its execution, and its sizes in words."""

    model: LoadedModel
    execution: Execution
    said: str


def check_first_step(
    model: LoadedModel, plan: Plan, world: World, values: Values, device: torch.device
) -> str:
    """The outcome of the check, in one line (collective: every rank calls it).

    Raises `RunError` on every rank where a loss or a gradient differs.
    """
    if plan.model.mode != "train" or model.graph.loss is None:
        return ""
    if recipe_in(model.graph) is not None:
        return "the first step is not checked: one device does not round by the recipe of products"
    room = first_rank_says(free_memory(device), device=device)
    stored = sum(tensor.bytes for tensor in model.graph.parameters)
    # The script's own draws go on as if nothing had been checked.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            step = _smallest(model, plan, room, whole=TIMES * stored <= room)
        except AutoparError as error:
            return f"the first step is not checked: {error}"
        report = _compared(step, plan, world, values, device)
    said = step.said
    # Modules refer to themselves, and training wants the memory of the two that are done with.
    del step
    free_garbage(world.size)
    if isinstance(report, str):
        return f"the first step is not checked: {report}"
    if report.passed:
        count = sum(entry.what == "gradient" for entry in report.entries)
        return (
            f"the first step is checked on {said}: its loss and {count} gradients are those "
            "of one undivided pass"
        )
    worst = report.worst
    assert worst is not None
    raise RunError(
        f"the plan's step differs from one undivided pass on {said}: the {worst.what} of "
        f"{worst.tensor!r} by {worst.error:.1e} of its largest element. The program would train "
        "something else: leave out the check (check=False) only if that is meant, else plan "
        "without micro-batches or stages, and report the model"
    )


def free_memory(device: torch.device) -> int:
    """Bytes of memory that are free on a device; of CPUs, a rank's part of those on its host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(lines["MemAvailable"].split()[0]) * 1024 // ranks


def _smallest(model: LoadedModel, plan: Plan, room: int, *, whole: bool) -> _Step:
    """The smallest step in which every operator has its planned strategy."""
    reason: AutoparError | None = None
    for call, said in _calls(model, plan):
        try:
            return _step(model, plan, call, said, room, whole=whole)
        except AutoparError as error:
            reason = error
    if whole:
        at = model.graph.tensors
        sizes = " and ".join("x".join(map(str, at[name].shape)) for name in model.graph.inputs)
        return _planned(model, plan, f"inputs of {sizes}", room)
    assert reason is not None
    raise reason


def _calls(model: LoadedModel, plan: Plan) -> Iterator[tuple[Any, str]]:
    """Calls with few samples and short sequences, on the meta device, and their sizes in words."""
    if model.at_sizes is None or model.call is None:
        return
    call = pytree.tree_map_only(torch.Tensor, lambda value: value.to("meta"), model.call)
    parts = _parts(plan)
    # A single sample would let dims of size 1 pass for others.
    samples = max(plan.schedule.micro_batches * parts, 2)
    length = LENGTH * (plan.mesh_.devices // parts)
    if lengths := lengths_of(call, length):
        yield cut_call(call, samples, length, lengths), f"{samples} samples of {length}"
    yield cut_call(call, samples, 0, frozenset()), f"{samples} samples"


def _parts(plan: Plan) -> int:
    """The parts into which the mesh cuts a micro-batch: the most of dim 0 of an activation."""
    most = 1
    axes = plan.meshes()
    for name, operator in plan.operators.items():
        for tensor, layout in operator.inputs:
            if tensor not in plan.parameters:
                pairs = zip(parse_layout(layout), axes[name], strict=True)
                most = max(most, math.prod(axis.size for place, axis in pairs if place == S(0)))
    return most


def _step(model: LoadedModel, plan: Plan, call: Any, said: str, room: int, *, whole: bool) -> _Step:
    module = model.module if model.given is None else model.given
    assert model.at_sizes is not None
    if not whole:
        assert model.torch is not None
        firsts = frozenset(stage.first for stage in plan.stages)
        module = twin_of(module, wide=False)
        left_out = leave_out_equal(module, model.torch.reads, firsts)
        said = f"{said}, {left_out} equal layers left out"
    small = model.at_sizes(module, call)
    _require_room(small, room)
    execution = as_planned_at(plan, _analysis(small))
    return _Step(model=with_values(small, 0), execution=execution, said=said)


def _planned(model: LoadedModel, plan: Plan, said: str, room: int) -> _Step:
    """The step at the planned sizes."""
    _require_room(model, room)
    execution = plan.execution(_analysis(model))
    return _Step(model=with_values(model, 0), execution=execution, said=said)


def _require_room(model: LoadedModel, room: int) -> None:
    """Refuse a step that may need more than the free memory.

    It holds all values twice, and of the parameters the gradients of both sides and one on its way.
    """
    held = 2 * sum(tensor.bytes for tensor in model.graph.tensors.values())
    held += 3 * sum(tensor.bytes for tensor in model.graph.parameters)
    if held > room:
        raise PlanError(f"it takes {held / 2**30:.1f} GiB, and {room / 2**30:.1f} are free")


def _analysis(model: LoadedModel) -> Analysis:
    """The analysis of a model; what draws at random does not, so that both passes do the same."""
    graph = model.graph
    return analyse(evaluated(graph) if is_random(graph) else graph, train=True)


def _compared(
    step: _Step, plan: Plan, world: World, values: Values, device: torch.device
) -> Report | str:
    """The differences of a step, on every rank, or why there are none."""
    present = _values(step.model, values)
    inputs = [value.to(device) for value in step.model.inputs or ()]
    options = ModuleOptions(device=device)
    module = ParallelModule(step.execution, world, present, options=options)
    module.engine.plan = plan
    planned = observe(module, inputs, optimizer="none", steps=1)
    answer: list[Report | str] = [""]
    if world.rank == 0:
        graph = step.execution.graph
        try:
            undivided = _undivided(graph, present, inputs)
            planned = replace(planned, outputs={})

            def perturbed() -> Observation:
                moved = {n: nudged(v) for n, v in present.items() if isinstance(v, Tensor)}
                return _undivided(graph, {**present, **moved}, inputs)

            answer = [
                differences(undivided, planned, graph=graph, optimizer="none", perturbed=perturbed)
            ]
            if not all(map(math.isfinite, (*planned.losses, *undivided.losses))):
                answer = ["its loss is no finite number for drawn inputs"]
        except Exception as error:  # the other ranks wait for the answer
            answer = [f"one device cannot run it: {type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0, device=device)
    return answer[0]


def _undivided(graph: Graph, values: Values, inputs: Sequence[Tensor]) -> Observation:
    """Loss and gradients of one pass of the whole graph on this device."""
    tensors = dict(zip(graph.inputs, inputs, strict=True))
    leaves: dict[str, Tensor] = {}
    device = inputs[0].device if inputs else torch.device("cpu")
    for tensor in graph.tensors.values():
        if tensor.role not in (Role.PARAMETER, Role.CONSTANT):
            continue
        given = values[tensor.name]
        value = (given if isinstance(given, Tensor) else given()).detach().to(device)
        if tensor.trainable:
            # The leaf has the type that the plan stores, in which it has its gradient.
            leaves[tensor.name] = value.requires_grad_(True)
        tensors[tensor.name] = value.to(getattr(torch, tensor.dtype))
    run_operators(graph, tensors, last_uses(graph))
    assert graph.loss is not None
    loss = tensors[graph.loss]
    made = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    named = zip(leaves, made, strict=True)
    gradients = {name: value.cpu() for name, value in named if value is not None}
    return Observation(
        outputs={},
        losses=(float(loss.detach()),),
        gradients=gradients,
        smallest={},
        largest={},
        weights={},
    )


def _values(model: LoadedModel, values: Values) -> Mapping[str, Any]:
    """The values of a smaller model: those of the model, and constants of its own."""
    constants = model.torch.constants if model.torch is not None else {}
    return {**values, **constants}
