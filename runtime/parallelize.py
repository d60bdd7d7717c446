"""From a loaded model and a plan to the planned module of this rank."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import ModelError, PlanError, UsageError, unknown
from autopar.ir import Role
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.sharding.analysis import analyse

from .collectives import DeviceGroups
from .launch import init_from_environment, require_cuda
from .module import ParallelModule
from .onnx_module import fresh_weights, to_torch

ONNX_SEED = 0
"""Seed of fresh weights for an ONNX file that holds none."""


def parallelize(model: LoadedModel, plan: Plan, *, backend: str | None = None, outputs: str | None = None) -> ParallelModule:
    """This rank's module of a plan, in the present process group or in one made from the environment of `torchrun`."""
    whole = wants_whole(outputs, plan, model)
    program = plan.execution(analyse(model.graph, train=plan.model.mode == "train"))
    device = join_world(plan, backend)
    groups = DeviceGroups.create(plan.mesh_)
    return ParallelModule(program, groups, model_values(model), model=model, device=device, whole=whole)


def wants_whole(outputs: str | None, plan: Plan, model: LoadedModel) -> bool:
    """Whether split outputs are gathered; by default, unless the loss is the plan's own and needs none of them.

    The mean square stands for a loss that the caller makes of the outputs, so they are wanted whole.
    """
    if outputs not in (None, "whole", "split"):
        raise UsageError(unknown("form of outputs", outputs, ["split", "whole"]))
    if outputs is not None:
        return outputs == "whole"
    return plan.model.loss is None or plan.model.loss not in model.source.outputs


def join_world(plan: Plan, backend: str | None) -> torch.device:
    """Make sure that this process is one of as many ranks as the plan has devices; the device it works on."""
    if backend == "nccl":
        require_cuda()
    if not dist.is_initialized():
        if plan.devices == 1 and "RANK" not in os.environ:
            return torch.device("cuda" if backend == "nccl" else "cpu")
        init_from_environment(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    if dist.get_world_size() != plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} ranks, but {dist.get_world_size()} run; start as many, or plan again with --devices"
        )
    name = dist.get_backend()
    if backend is not None and backend not in name:
        raise PlanError(f"the process group's backend is {name}, not {backend}")
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in name else torch.device("cpu")


def model_values(model: LoadedModel, *, seed: int = ONNX_SEED) -> dict[str, Tensor | Callable[[], Tensor]]:
    """Whole values of every parameter and constant, by graph name; ONNX weights are read one at a time, when asked for."""
    if model.torch is not None:
        return _module_values(model)
    graph = model.graph
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
        except (RuntimeError, MemoryError) as error:  # what torch says of memory that it cannot have
            raise ModelError(f"the weights that the model file lacks cannot be drawn: {str(error).splitlines()[0]}") from error
    return found


def _module_values(model: LoadedModel) -> dict[str, Tensor | Callable[[], Tensor]]:
    assert model.torch is not None
    module: nn.Module = model.module
    found: dict[str, Tensor | Callable[[], Tensor]] = dict(model.torch.constants)
    found.update(module.named_buffers())
    found.update(module.named_parameters())
    on_meta = [name for name, value in found.items() if isinstance(value, Tensor) and value.is_meta]
    if on_meta:
        raise ModelError(f"the module has no weights: {', '.join(on_meta[:5])} lie on the meta device; materialise it before running")
    return found
