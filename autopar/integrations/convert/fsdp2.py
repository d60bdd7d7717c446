"""PyTorch's FSDP2: `fully_shard` on the layers of a model.

It takes plans that split only the batch and the storage of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.ir.dtype import HALVES
from autopar.plan import Plan
from autopar.printable import printable

from .reach import REPLICAS, Reach, lacks
from .setup import Converted, Setup

TARGET = "fsdp2"
REACH = (Reach(axes=REPLICAS, infers=True),)
_LAYER = re.compile(r"^(.*?\.)?\d+(?=\.)")


def fsdp2(setup: Setup) -> Converted:
    """The file: `shard(module)`, to be called on every rank."""
    setup.refuse(TARGET, *setup.mixed(), *lacks(REACH, setup))
    lost = [*setup.lost, *setup.minor()]
    lost += accumulated(setup)
    if setup.recompute != "none":
        lost.append(f"recompute ({setup.recompute}) is left to torch.utils.checkpoint")
    compute, reduce = precision_of(setup)
    replicas = setup.degree("data") // setup.shards
    name = printable(setup.plan.model.name, lines=False)
    text = _FILE.format(
        model=name,
        ranks=setup.ranks,
        notes="".join(f"#   {note}\n" for note in lost),
        replicas=replicas,
        shards=setup.shards,
        units=units_of(setup.plan),
        compute=compute,
        reduce=reduce,
        reshard=setup.zero == 3,
    )
    return Converted(text=text + micro_batch_function(setup), lost=tuple(lost))


def accumulated(setup: Setup) -> Iterator[str]:
    """The sentence on the training loop of a plan with micro-batches."""
    count = setup.plan.schedule.micro_batches
    if count > 1:
        called = ", with micro_batch(module, last) before each" * bool(micro_batch_function(setup))
        yield f"the training loop adds up the gradients of {count} micro-batches{called}"


def micro_batch_function(setup: Setup) -> str:
    """The function of written files that is called before each micro-batch; "" without any.

    FSDP2 gathers, reduces and sums over replicas in every pass unless it is told.
    """
    plan = setup.plan
    if plan.model.mode == "infer" or plan.schedule.micro_batches == 1 or setup.degree("data") == 1:
        return ""
    calls = []
    if setup.zero < 2:
        calls.append("set_requires_gradient_sync(last)  # whole gradients, reduced once a step")
    elif setup.degree("data") > setup.shards:
        calls.append("set_requires_all_reduce(last)  # shards, summed over replicas once a step")
    if setup.zero < 3:
        calls.append("set_reshard_after_backward(last)  # parameters gathered once a step")
    if not calls:
        return ""
    lines = "".join(f"    module.{call}\n" for call in calls)
    return f"{_MICRO_BATCH}{lines}"


def precision_of(setup: Setup) -> tuple[str, str]:
    """The types of a `MixedPrecisionPolicy`: of the computation, and of gradients that travel."""
    schedule = setup.plan.schedule
    dtype = setup.parameter_type(HALVES)
    compute = f"torch.{dtype}" if schedule.master and dtype else "None"
    return compute, f"torch.{schedule.reduce}" if schedule.reduce else "None"


def units_of(plan: Plan) -> tuple[str, ...]:
    """Patterns of the repeated layers, which are gathered one at a time.

    They are the lists of modules whose names have numbers, such as `h.*`.
    """
    layers = (match[0] for name in plan.parameters if (match := _LAYER.match(name)))
    return tuple(dict.fromkeys(re.sub(r"\d+$", "*", name) for name in layers))


_MICRO_BATCH = '''

def micro_batch(module: nn.Module, last: bool) -> None:
    """To be called before each micro-batch of a step; `last`: whether it is the last one."""
'''
UNITS_FUNCTION = '''def units(module: nn.Module) -> list[nn.Module]:
    """The layers of UNITS, innermost and last first; ValueError if a pattern names none."""
    named: dict[str, list[nn.Module]] = {{unit: [] for unit in UNITS}}
    for name, inner in reversed(list(module.named_modules())):
        for unit in UNITS:
            # A star is one number: h.* is not h.0.attn.1.
            if fnmatchcase(name, unit) and name.count(".") == unit.count("."):
                named[unit].append(inner)
    missing = [unit for unit, layers in named.items() if not layers]
    if missing:
        raise ValueError(f"no module of {{type(module).__name__}} is called {{missing[0]}}")
    return [inner for layers in named.values() for inner in layers]
'''
"""The function of written files that finds the units of a module."""
_FILE = (
    """# A plan for {model} on {ranks} ranks, as FSDP2 takes it.
# Call shard(module) on every rank of torchrun, before the optimizer is made.
{notes}
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

REPLICAS, SHARDS = {replicas}, {shards}
UNITS = {units}
POLICY = MixedPrecisionPolicy(param_dtype={compute}, reduce_dtype={reduce})


def shard(module: nn.Module, device: str = "cuda") -> nn.Module:
    whole = init_device_mesh(device, (REPLICAS, SHARDS), mesh_dim_names=("replicas", "shards"))
    mesh = whole if REPLICAS > 1 else whole["shards"]
    for inner in units(module):
        fully_shard(inner, mesh=mesh, mp_policy=POLICY, reshard_after_forward={reshard})
    fully_shard(module, mesh=mesh, mp_policy=POLICY, reshard_after_forward={reshard})
    return module


"""
    + UNITS_FUNCTION
)
