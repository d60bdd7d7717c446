"""PyTorch's `parallelize_module`: the plan as a Python file of `ParallelStyle`s.

Data parallelism is added by `fully_shard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autopar.printable import printable

from .axis_work import AxisWork
from .fsdp2 import UNITS_FUNCTION, accumulated, micro_batch_function, precision_of, units_of
from .linears import Split, splits_of
from .reach import REPLICAS, WEIGHTS, Reach, lacks
from .setup import Converted, Setup
from .splittable import BY_MODULE

_PLACE = {
    "whole": "Replicate()",
    "batch": "Shard(0)",
    "sequence": "Shard(1)",
    "features": "Shard(-1)",
}
TARGET = "dtensor"
REACH = (Reach(axes=(*REPLICAS, *WEIGHTS), infers=True, weights=BY_MODULE),)


def dtensor(setup: Setup) -> Converted:
    """The file: `parallelize(module)`, to be called on every rank."""
    shared = [axis for axis in setup.axes if axis.mixed]
    setup.refuse(TARGET, *_lacks(setup, shared))
    splits = splits_of(setup, TARGET)
    fused = [name for name, split in splits.items() if split.parts > 1]
    if fused:
        named = ", ".join(fused[:5])
        setup.refuse(TARGET, f"fused projections split in each of their parts ({named})")
    lost = tuple(_losses(setup, splits))
    tensor = shared[0].size if shared else setup.degree("tensor")
    shards = math.prod(
        axis.size
        for axis in setup.axes
        if axis.work == "data" and axis.stored_split and not axis.mixed
    )
    compute, reduce = precision_of(setup)
    text = _FILE.format(
        compute=compute,
        reduce=reduce,
        model=printable(setup.plan.model.name, lines=False),
        ranks=setup.ranks,
        notes="".join(f"#   {note}\n" for note in lost),
        replicas=setup.degree("data", "tensor") // (tensor * shards),
        shards=shards,
        tensor=tensor,
        both=bool(shared),
        plan="\n".join(f"    {name!r}: {_style(split)}," for name, split in splits.items()),
        units=units_of(setup.plan),
        zero=setup.zero,
        reshard=setup.zero == 3,
    )
    return Converted(text=text + micro_batch_function(setup), lost=lost)


def _lacks(setup: Setup, shared: Sequence[AxisWork]) -> Iterable[str]:
    """Parts of a plan that the file cannot do; `shared`: the axes with two kinds of work."""
    yield from lacks(REACH, setup)
    # Ranks may have shares of the batch and of the weights at once, but no other two kinds of work.
    if any({*axis.mixed, axis.work} - {"data", "tensor"} for axis in shared):
        yield from setup.mixed(share=1)


def _losses(setup: Setup, splits: Mapping[str, Split]) -> Iterable[str]:
    """Sentences on parts of a plan that the file leaves to others, or does in another way."""
    yield from setup.lost
    yield from accumulated(setup)
    if setup.plan.schedule.master and setup.degree("data") == 1:
        yield (
            f"computing in another type than {setup.plan.schedule.master}, in which parameters are "
            "stored, is left to torch.autocast: no data axis, whose policy would say it"
        )
    if setup.recompute != "none":
        yield f"recompute ({setup.recompute}) is left to torch.utils.checkpoint"
    gathered = [
        name
        for name, split in splits.items()
        if split.style == "column" and split.leaves in ("whole", "batch")
    ]
    if gathered:
        yield (
            f"the output of {', '.join(gathered[:5])} is brought together for the loss, which the "
            "plan may compute on split values"
        )
    if any(split.comes == "sequence" for split in splits.values()):
        yield (
            "modules that read the length of the sequence off values between tensor-parallel "
            "layers see that of their part (as attention that reshapes by its input's shape)"
        )
    if splits:
        yield (
            "modules that reshape features must take the number of heads from the shape (-1), "
            "since each rank holds its own"
        )


def _style(split: Split) -> str:
    comes = _PLACE[split.comes]
    leaves = _PLACE[split.leaves]
    match split.style:
        case "column":
            if split.leaves == "features":
                return f"ColwiseParallel(input_layouts={comes})"
            return f"ColwiseParallel(input_layouts={comes}, output_layouts={leaves})"
        case "row" | "embedding rows":
            return f"RowwiseParallel(input_layouts={comes}, output_layouts={leaves})"
        case "embedding columns":
            return f"ColwiseParallel(input_layouts={comes}, output_layouts={leaves})"
        case "norm":
            return f"SequenceParallel(sequence_dim={split.dim}, use_local_output=True)"


_FILE = (
    """# A plan for {model} on {ranks} ranks, as PyTorch's parallelize_module takes it.
# Call parallelize(module) on every rank of torchrun, before the optimizer is made.
{notes}
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

REPLICAS, SHARDS, TENSOR = {replicas}, {shards}, {tensor}
BOTH = {both}  # whether the ranks along TENSOR have shares of the batch as well
PLAN = {{
{plan}
}}
UNITS = {units}
POLICY = MixedPrecisionPolicy(param_dtype={compute}, reduce_dtype={reduce})


def parallelize(module: nn.Module, device: str = "cuda") -> nn.Module:
    names = ("replicas", "shards", "tensor")
    mesh = init_device_mesh(device, (REPLICAS, SHARDS, TENSOR), mesh_dim_names=names)
    if BOTH:
        sizes = (REPLICAS, SHARDS * TENSOR) if {zero} else (REPLICAS * SHARDS * TENSOR, 1)
        data = init_device_mesh(device, sizes, mesh_dim_names=("replicas", "shards"))
    else:
        data = mesh["replicas", "shards"]
    named = {{name: id(value) for name, value in module.named_parameters(remove_duplicate=False)}}
    if TENSOR > 1:
        parallelize_module(module, mesh["tensor"], PLAN)
        tie(module, named)
    split = {{value for value in module.parameters() if BOTH and isinstance(value, DTensor)}}
    for value in split:
        value.register_hook(lambda gradient: averaged(gradient, mesh, data.size()))
    if data.size() > 1:
        data = data if data.size(0) > 1 else data["shards"]
        for inner in (*units(module), module):
            fully_shard(
                inner,
                mesh=data,
                mp_policy=POLICY,
                reshard_after_forward={reshard},
                ignored_params=split,
            )
    return module


"""
    + UNITS_FUNCTION
    + '''

def tie(module: nn.Module, named: dict[str, int]) -> None:
    """Parameters that were one are one again: each of their modules has split its own."""
    for key in set(named.values()):
        places = [name.rpartition(".") for name, other in named.items() if other == key]
        held = [getattr(module.get_submodule(owner), leaf) for owner, _, leaf in places]
        split = [value for value in held if isinstance(value, DTensor)]
        if any(value.placements != split[0].placements for value in split):
            raise ValueError(f"{{places[0]}} has several names, and the plan splits it in two ways")
        for owner, _, leaf in places if len(places) > 1 else ():
            setattr(module.get_submodule(owner), leaf, (split or held)[0])


def averaged(gradient: DTensor, mesh: object, ranks: int) -> DTensor:
    """The gradient of a split weight: the sum over all shares of the batch, by their number."""
    local = gradient.to_local() / ranks
    for name in ("replicas", "shards"):
        if mesh[name].size() > 1:
            dist.all_reduce(local, group=mesh[name].get_group())
    return DTensor.from_local(local, gradient.device_mesh, gradient.placements, run_check=False)
'''
)
