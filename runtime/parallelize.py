"""From a loaded model and a plan to the planned module of this rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError, UsageError, unknown
from autopar.facts import is_plain
from autopar.forking import free_garbage
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from autopar.sharding.rules import tensors_of_parameters

from .checking.first_step import check_first_step
from .launch import (
    default_backend,
    device_of_group,
    init_from_environment,
    launched,
    require_backend,
)
from .launch.backends import device_type
from .models.model_values import model_values
from .module.changes import Remaking, skeleton_of
from .module.held_shards import Values
from .module.parallel_module import ModuleOptions, ParallelModule
from .parameters.torch_layouts import require_placements
from .ranks.agreement import agree, digest
from .ranks.collectives import in_movable_type
from .ranks.current_action import aside
from .ranks.world import World
from .torch_versions import require_checked

Prepared = Callable[[], tuple[LoadedModel, Plan]]


def parallelize(
    prepare: Prepared,
    *,
    backend: str | None = None,
    outputs: str | None = None,
    exact_random: bool = False,
    debug: bool = False,
    weights: str | Path | None = None,
    parts: bool = False,
    broadcast: bool = False,
    check: bool = False,
) -> ParallelModule:
    """This rank's module of the model and plan that `prepare` loads.

    It runs in the present process group, or in one made from the environment of `torchrun`.
    `weights`: files to read instead of the model's own weights. `parts`: calls get this rank's part
    of the batch, not all of it. `broadcast`: the weights are those of rank 0; else they must be
    equal on all ranks, except parameters that are each rank's own. `check`: the first step is
    checked against one undivided pass. If one rank cannot take part, or plans, models or weights
    differ, every rank raises.
    """
    loaded: tuple[LoadedModel, Plan] | None = None
    failure: Exception | None = None
    try:
        model, plan = prepare()
        analysis = analyse(model.graph, train=plan.model.mode == "train")
        whole = wants_whole(outputs, plan, model, analysis.gradients)
        execution = plan.execution(analysis)
        require_placements(execution)
        device = join_world(plan, backend)
        require_checked()
        values = model_values(model, plan.schedule.types, weights=weights)
        loaded = model, plan
    except Exception as error:
        # The other ranks wait in the comparison, which tells them.
        failure = error
    agree_on_model(loaded, failure)
    assert loaded is not None
    world = World.of(execution)
    if broadcast:
        values = from_first_rank(values, own=execution.schedule.reductions.local, device=device)
    module = ParallelModule(
        execution,
        world,
        values,
        model=model,
        options=ModuleOptions(
            device=device,
            whole=whole,
            exact_random=exact_random,
            debug=debug,
            remaking=remaking_of(model, plan),
            parts=parts,
        ),
    )
    module.engine.plan = plan
    if model.torch is not None:
        module.planned_in(model.module, model.torch.reads)
    agree({"the weights": module.weights_digest}, device=device)
    if check and (said := check_first_step(model, plan, world, values, device)) and world.rank == 0:
        print(f"autopar: {said}", file=sys.stderr)
    if world.stage is None:
        print(
            f"rank {world.rank} is left idle by the plan, which is for {execution.devices} "
            f"of {world.size} ranks",
            file=sys.stderr,
        )
    # What loading has left refers to itself, and training wants its memory.
    del loaded, model, values
    free_garbage(world.size)
    return module


def remaking_of(model: LoadedModel, plan: Plan) -> Remaking:
    """The means to make other programs of a model, which hold none of its weights."""
    module = model.module if model.given is None else model.given
    skeleton = None
    if isinstance(module, torch.nn.Module) and model.reload is not None:
        skeleton = skeleton_of(module, is_plain)
    return Remaking(plan, model.graph, skeleton, model.reload)


def from_first_rank(
    values: Values, *, own: Collection[str], device: torch.device
) -> dict[str, Tensor | Callable[[], Tensor]]:
    """The values that rank 0 has, on every rank; each keeps its `own`."""
    if not dist.is_initialized():
        return dict(values)

    def told(value: Tensor | Callable[[], Tensor]) -> Tensor:
        mine = value if isinstance(value, Tensor) else value()
        # The broadcast writes into a copy, since the caller's own weights must stay as they are.
        whole = mine.detach().to(device, copy=True).contiguous()
        with aside():
            dist.broadcast(in_movable_type(whole), src=0)
        return whole

    # All ranks have the same names in the same order: a broadcast waits for its like.
    return {name: values[name] if name in own else told(values[name]) for name in values}


def agree_on_model(loaded: tuple[LoadedModel, Plan] | None, failure: Exception | None) -> None:
    """Check that all ranks have the same plan and the same model; else all raise."""
    if failure is not None and not dist.is_initialized():
        # The others wait for this rank, so it joins them to report its error.
        with contextlib.suppress(Exception):
            if launched() is not None:
                init_from_environment(default_backend())
    device = device_of_group()
    if loaded is None:
        agree({"the plan": bytes(16), "the model": bytes(16)}, failure=failure, device=device)
        raise AssertionError("a rank that has failed does not go on")
    model, plan = loaded
    facts = {"the plan": digest(plan.to_json()), "the model": digest(model.graph.fingerprint())}
    agree(facts, device=device)


def wants_whole(
    outputs: str | None, plan: Plan, model: LoadedModel, gradients: Collection[str]
) -> bool:
    """Whether split outputs are gathered.

    By default they are, unless the plan's own loss makes them unnecessary.
    With the mean square as a stand-in for the caller's loss of the outputs, they are wanted whole.
    So are outputs that do not lead to the loss: a script adds something of theirs to it.
    `gradients`: the tensors that lead from parameters to the loss.
    """
    if outputs not in (None, "whole", "split"):
        raise UsageError(unknown("form of outputs", outputs, ["split", "whole"]))
    if outputs is not None:
        return outputs == "whole"
    if plan.model.loss is None or plan.model.loss not in model.source.outputs:
        return True
    beside = tensors_of_parameters(model.graph) - set(gradients)
    return plan.model.mode == "train" and not beside.isdisjoint(model.source.outputs)


def join_world(plan: Plan, backend: str | None) -> torch.device:
    """Make sure that there are as many ranks as the plan has devices; return this one's device."""
    if backend is not None:
        require_backend(backend)
    if not dist.is_initialized():
        # A plan for one device runs without a process group, unless a launcher has started ranks.
        if plan.devices == 1 and launched() is None:
            return torch.device(device_type(backend or "gloo"))
        init_from_environment(backend or default_backend())
    if dist.get_world_size() < plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} ranks, but {dist.get_world_size()} run; start as "
            "many, or plan again with --devices"
        )
    name = dist.get_backend()
    if backend is not None and backend not in name:
        raise PlanError(f"the process group's backend is {name}, not {backend}")
    return device_of_group()
