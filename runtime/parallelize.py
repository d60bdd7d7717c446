"""From a loaded model and a plan to the planned module of this rank."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import ModelError, PlanError, UsageError, unknown
from autopar.ir import Role
from autopar.model import LoadedModel
from autopar.order.execution import Execution
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from autopar.sharding.rules.modes import evaluated
from autopar.sharding.schedule import PLAIN, Types

from .agreement import agree, digest
from .current_action import aside
from .held_shards import Values
from .launch import init_from_environment, require_cuda
from .module import ParallelModule
from .onnx_module import fresh_weights, to_torch
from .weight_files import FileTensor
from .weights import saved_buffers, values_from_files
from .world import World

ONNX_SEED = 0
"""Seed of fresh weights for an ONNX file that holds none."""


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
) -> ParallelModule:
    """This rank's module of the model and plan that `prepare` loads.

    It runs in the present process group, or in one made from the environment of `torchrun`. `weights`: files to read
    instead of the model's own weights. `parts`: calls get this rank's part of the batch, not all of it. `broadcast`:
    the weights are those of rank 0; else they must be equal on all ranks, except parameters that are each rank's own.
    If one rank cannot take part, or plans, models or weights differ, every rank raises.
    """
    found: tuple[LoadedModel, Plan, Execution] | None = None
    failure: Exception | None = None
    try:
        model, plan = prepare()
        whole = wants_whole(outputs, plan, model)
        execution = plan.execution(analyse(model.graph, train=plan.model.mode == "train"))
        device = join_world(plan, backend)
        values = model_values(model, plan.schedule.types, weights=weights)
        found = model, plan, execution
    except Exception as error:
        failure = error
    agree_on_model(found, failure)
    assert found is not None
    world, graph = World.of(execution), model.graph  # nothing kept for later may hold the original module
    if broadcast:
        values = from_first_rank(values, own=execution.schedule.reductions.local, device=device)
    module = ParallelModule(
        execution, world, values, model=model, device=device, whole=whole, exact_random=exact_random, debug=debug,
        evaluation=lambda: plan.execution(analyse(evaluated(graph), train=plan.model.mode == "train")), parts=parts,
    )  # fmt: skip
    module.engine.plan = plan
    if model.torch is not None:
        module.planned_in(model.module)
    agree({"the weights": module.weights_digest}, device=device)
    if world.stage is None:
        print(f"rank {world.rank} is left idle by the plan, which is for {execution.devices} of {world.size} ranks", file=sys.stderr)
    return module


def from_first_rank(
    values: Values, *, own: Collection[str], device: torch.device
) -> dict[str, Tensor | Callable[[], Tensor]]:
    """The values that rank 0 has, on every rank; each keeps its `own`."""
    if not dist.is_initialized():
        return dict(values)

    def told(value: Tensor | Callable[[], Tensor]) -> Tensor:
        whole = (value if isinstance(value, Tensor) else value()).detach().to(device, copy=True).contiguous()
        with aside():
            dist.broadcast(whole, src=0)
        return whole

    return {name: values[name] if name in own else told(values[name]) for name in values}


def agree_on_model(found: tuple[LoadedModel, Plan, Execution] | None, failure: Exception | None) -> None:
    """Check that all ranks have the same plan and the same model; else all raise."""
    if "RANK" in os.environ and not dist.is_initialized() and failure is not None:
        with contextlib.suppress(Exception):  # the others wait for this rank, so it joins them to report its error
            init_from_environment("nccl" if torch.cuda.is_available() else "gloo")
    device = _device_of_group()
    if found is None:
        agree({"the plan": bytes(16), "the model": bytes(16)}, failure=failure, device=device)
        raise AssertionError("a rank that has failed does not go on")
    model, plan, _ = found
    agree({"the plan": digest(plan.to_json()), "the model": digest(model.graph.fingerprint())}, device=device)


def _device_of_group() -> torch.device:
    nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def wants_whole(outputs: str | None, plan: Plan, model: LoadedModel) -> bool:
    """Whether split outputs are gathered; by default they are, unless the plan's own loss makes them unnecessary.

    With the mean square as a stand-in for the caller's loss of the outputs, they are wanted whole.
    """
    if outputs not in (None, "whole", "split"):
        raise UsageError(unknown("form of outputs", outputs, ["split", "whole"]))
    if outputs is not None:
        return outputs == "whole"
    return plan.model.loss is None or plan.model.loss not in model.source.outputs


def join_world(plan: Plan, backend: str | None) -> torch.device:
    """Make sure that this process is one of at least as many ranks as the plan has devices; the device it works on."""
    if backend == "nccl":
        require_cuda()
    if not dist.is_initialized():
        if plan.devices == 1 and "RANK" not in os.environ:
            return torch.device("cuda" if backend == "nccl" else "cpu")
        init_from_environment(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    if dist.get_world_size() < plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} ranks, but {dist.get_world_size()} run; start as many, or plan again with --devices"
        )
    name = dist.get_backend()
    if backend is not None and backend not in name:
        raise PlanError(f"the process group's backend is {name}, not {backend}")
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in name else torch.device("cpu")


def model_values(
    model: LoadedModel, types: Types = PLAIN.types, *, seed: int = ONNX_SEED, weights: str | Path | None = None
) -> dict[str, Tensor | Callable[[], Tensor]]:
    """Values of every parameter (in its stored type) and constant, by graph name.

    Values in files are read one at a time, when asked for. `weights`: safetensors files of a PyTorch model.
    """
    graph = replace(model.graph, tensors={name: replace(t, dtype=types.stored(t)) for name, t in model.graph.tensors.items()})
    given = values_from_files(replace(model, graph=graph), weights) if weights is not None else {}
    if model.torch is not None:
        return _module_values(model, types, given)
    wanted = {t.name: getattr(torch, t.dtype) for t in graph.tensors.values() if t.role in (Role.PARAMETER, Role.CONSTANT)}
    found: dict[str, Tensor | Callable[[], Tensor]] = {
        n: to_torch(array).to(wanted[n]) for n, array in graph.constants.items() if n in wanted
    }
    stored = model.weights() if model.weights is not None else ()
    found.update((n, to_torch(array).to(wanted[n])) for n, array in stored if n in wanted and n not in found)
    missing = [name for name in wanted if name not in found]
    if missing:
        try:
            found.update((n, value) for n, value in fresh_weights(graph, seed) if n in missing)
        except (RuntimeError, MemoryError) as error:  # torch's error for memory that it cannot get
            raise ModelError(f"the weights that the model file lacks cannot be drawn: {str(error).splitlines()[0]}") from error
    return found


def _module_values(
    model: LoadedModel, types: Types, files: Mapping[str, Tensor | FileTensor]
) -> dict[str, Tensor | Callable[[], Tensor]]:
    """Values of a module; parameters that are stored in another type than used have their values before the cast."""
    assert model.torch is not None
    module: nn.Module = model.module
    found: dict[str, Tensor | Callable[[], Tensor]] = dict(model.torch.constants)
    found.update(module.named_buffers())
    found.update(module.named_parameters())
    given = dict(module.named_parameters() if model.given is None else model.given.named_parameters())
    for tensor in model.graph.parameters:
        if types.casts(tensor):
            found[tensor.name] = _cast(given[tensor.name].detach(), getattr(torch, types.stored(tensor)))
    found.update(files)
    on_meta = [name for name, value in found.items() if isinstance(value, Tensor) and value.is_meta]
    if files:
        read = {name for paths, _ in saved_buffers(module) for name in paths} | set(model.graph.tensors)
        on_meta = [name for name in on_meta if name in read]
    if on_meta and files:
        raise ModelError(
            f"no file holds {', '.join(on_meta[:5])}, computed when the module is made, which was on the meta device: "
            "make it under autopar.parameters_on_meta(), which leaves buffers where they are"
        )
    if on_meta:
        raise ModelError(
            f"the module has no weights: {', '.join(on_meta[:5])} lie on the meta device; "
            "give their files as weights=FOLDER (--weights FOLDER), or materialise it before running"
        )
    return found


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor | Callable[[], Tensor]:
    """A value in that type, cast when it is asked for."""
    return value if value.dtype == dtype or value.is_meta else partial(value.to, dtype)
