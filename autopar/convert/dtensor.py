"""PyTorch's `parallelize_module`: the plan as a Python file of `ParallelStyle`s, with data parallelism by `fully_shard` or `replicate`."""

from __future__ import annotations

from ..printable import printable
from .fsdp2 import units_of
from .linears import Split, splits_of
from .setup import Converted, Setup

_PLACE = {"whole": "Replicate()", "sequence": "Shard(1)", "features": "Shard(-1)"}
TARGET = "dtensor"


def dtensor(setup: Setup) -> Converted:
    """The file: `parallelize(module)`, to be called on every rank."""
    setup.refuse(
        TARGET,
        setup.staged(),
        setup.lacking("sequence", "splitting the sequence of attention"),
        setup.lacking("expert", "splitting experts"),
    )
    splits = splits_of(setup, TARGET)
    fused = [name for name, split in splits.items() if split.parts > 1]
    setup.refuse(TARGET, f"fused projections split in each of their parts ({', '.join(fused[:5])})" if fused else "")
    lines = [f"    {name!r}: {_style(split)}," for name, split in splits.items()]
    lost = [*setup.lost]
    if setup.plan.schedule.micro_batches > 1:
        lost.append(f"the training loop adds up the gradients of {setup.plan.schedule.micro_batches} micro-batches")
    if setup.recompute != "none":
        lost.append(f"recompute ({setup.recompute}) is left to torch.utils.checkpoint")
    gathered = [name for name, split in splits.items() if split.style == "column" and split.leaves == "whole"]
    if gathered:
        lost.append(f"the output of {', '.join(gathered[:5])} is gathered for the loss, which the plan may compute on split values")
    if splits:
        lost.append("modules that reshape features must take the number of heads from the shape (-1), since each rank holds its own")
    text = _FILE.format(
        model=printable(setup.plan.model.name, lines=False), ranks=setup.ranks, notes="".join(f"#   {note}\n" for note in lost),
        data=setup.degree("data"), tensor=setup.degree("tensor"), plan="\n".join(lines), units=units_of(setup.plan),
        zero=setup.zero, reshard=setup.zero == 3,
    )  # fmt: skip
    return Converted(text=text, lost=tuple(lost))


def _style(split: Split) -> str:
    comes, leaves = _PLACE[split.comes], _PLACE[split.leaves]
    match split.style:
        case "column":
            whole = ", output_layouts=Replicate()" if split.leaves == "whole" else ""
            return f"ColwiseParallel(input_layouts={comes}{whole})"
        case "row":
            return f"RowwiseParallel(input_layouts={comes}, output_layouts={leaves})"
        case "embedding rows":
            return f"RowwiseParallel(input_layouts=Replicate(), output_layouts={leaves})"
        case "embedding columns":
            return f"ColwiseParallel(output_layouts={leaves})"
        case "norm":
            return "SequenceParallel()"


_FILE = '''# A plan for {model} on {ranks} ranks, as PyTorch's parallelize_module takes it.
# Call parallelize(module) on every rank of torchrun, before the optimizer is made.
{notes}
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

DATA, TENSOR = {data}, {tensor}
PLAN = {{
{plan}
}}
UNITS = {units}


def parallelize(module: nn.Module, device: str = "cuda") -> nn.Module:
    mesh = init_device_mesh(device, (DATA, TENSOR), mesh_dim_names=("data", "tensor"))
    if TENSOR > 1:
        parallelize_module(module, mesh["tensor"], PLAN)
    if DATA > 1 and {zero}:
        for name, inner in module.named_modules():
            if any(fnmatchcase(name, unit) for unit in UNITS) and name.rpartition(".")[2].isdecimal():
                fully_shard(inner, mesh=mesh["data"], reshard_after_forward={reshard})
        fully_shard(module, mesh=mesh["data"], reshard_after_forward={reshard})
    elif DATA > 1:
        replicate(module, device_mesh=mesh["data"])
    return module
'''
