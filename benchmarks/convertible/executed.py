"""Converted files of torch and transformers run on ranks and compared with one device.

The largest difference of outputs, or of the loss, and of gradients.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.integrations.convert import setup_of
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

from .models import build

TARGETS = ("dtensor", "fsdp2", "pipelining", "transformers")
"""The targets whose files torch and transformers run."""
FUNCTIONS = {"dtensor": "parallelize", "fsdp2": "shard", "pipelining": "pipelined"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A converted file, and the ranks that run it.

    `data`: shares of the batch, the ranks of each being neighbours; with stages those of one stage.
    `folder`: the saved model, for what transformers loads.
    """

    model: str
    target: str
    text: str
    ranks: int
    data: int = 1
    micro_batches: int = 1
    folder: str = ""


def executed(model: str, target: str, text: str, plan: Plan) -> Executed:
    """The file of a plan, on the plan's own ranks; styles alone on those that split weights."""
    setup = setup_of(plan)
    shared = any(axis.mixed for axis in setup.axes)
    return Executed(
        model=model,
        target=target,
        text=text,
        ranks=setup.ranks,
        data=setup.degree("data", "tensor") if shared else setup.degree("data"),
        micro_batches=plan.schedule.micro_batches,
    )


def difference(given: Executed) -> float:
    """The largest difference of a converted model on any rank."""
    work = _stages if given.target == "pipelining" else _whole
    with tempfile.TemporaryDirectory() as folder:
        if given.target not in FUNCTIONS:
            _transformers_own(build(given.model)[0]).save_pretrained(folder)
        return max(run_ranks(work, given.ranks, replace(given, folder=folder)))


def _whole(given: Executed) -> float:
    whole, inputs = build(given.model)
    whole.eval()
    module, before = _made(given, whole)
    share = dist.get_rank() * given.data // given.ranks
    wanted = whole(*inputs)
    wanted.float().square().mean().backward()
    mine = [value.chunk(given.data)[share] for value in (*inputs, wanted.detach())]
    worst = 0.0
    chunks = list(zip(*(value.chunk(given.micro_batches) for value in mine), strict=True))
    for number, (*chunk, right) in enumerate(chunks, 1):
        before(module, number == len(chunks))
        outputs = _full(module(*chunk))
        worst = max(worst, float((outputs - right).detach().abs().max()))
        (outputs.float().square().mean() / len(chunks)).backward()
    gradients = dict(module.named_parameters(remove_duplicate=False))
    named = whole.named_parameters()
    return max(worst, _gaps({name: gradients[name].grad for name, _ in named}, whole))


def _made(given: Executed, whole: nn.Module) -> tuple[nn.Module, Callable[[nn.Module, bool], None]]:
    """The module as the file makes it, and what is called before each micro-batch."""
    scope = dict[str, Any]()
    module = copy.deepcopy(whole)
    if given.target == "transformers":
        exec(_own_names(given.text), scope)
    else:
        exec(given.text, scope)
        module = scope[FUNCTIONS[given.target]](module, "cpu")
    if "CONFIG" in scope:
        rank = str(dist.get_rank())
        ranks = str(given.ranks)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        loaded = type(_transformers_own(whole)).from_pretrained(
            given.folder, distributed_config=scope["CONFIG"], dtype=torch.float32
        )
        module.model = loaded.eval()
    return module, scope.get("micro_batch", lambda module, last: None)


def _transformers_own(called: nn.Module) -> Any:
    """The module of transformers in one that is called with tensors in order."""
    return called.get_submodule("model")


def _own_names(text: str) -> str:
    """Names of modules as transformers' own module has them."""
    return re.sub(r"""(['"])model\.""", r"\1", text)


def _stages(given: Executed) -> float:
    whole, inputs = build(given.model)
    whole.eval()
    scope = dict[str, Any]()
    exec(given.text, scope)
    rank = dist.get_rank()
    data = given.data
    last = rank // data == scope["STAGES"] - 1
    mine = [value.chunk(data)[rank % data] for value in inputs]
    example = tuple(value.chunk(given.micro_batches)[0] for value in mine)
    schedule, parts = scope[FUNCTIONS[given.target]](
        copy.deepcopy(whole), example, lambda output, target: output.float().square().mean()
    )
    losses: list[Tensor] = []
    given_last = {"target": mine[0], "losses": losses} if last else {}
    schedule.step(*(mine if rank < data else ()), **given_last)
    wanted = whole(*inputs).float().square().mean()
    wanted.backward()
    mean = torch.stack(losses).mean().detach() / data if last else torch.zeros(())
    dist.all_reduce(mean)
    gradients = {
        path.removeprefix("module."): value.grad
        for part in parts
        for path, value in part.named_parameters()
    }
    return max(abs(float(mean - wanted)), _gaps(gradients, whole))


def _gaps(gradients: Mapping[str, Tensor | None], whole: nn.Module) -> float:
    """The largest difference from the gradients of one device, relative to the largest of them.

    Each is relative to its own largest element if that is above a thousandth of the model's.
    """
    wanted = {
        name: value.grad
        for name, value in whole.named_parameters(remove_duplicate=False)
        if value.grad is not None
    }
    least = max(float(grad.abs().max()) for grad in wanted.values()) / 1000
    worst = 0.0
    for name, gradient in gradients.items():
        if name in wanted and gradient is None:
            return float("inf")
        if name in wanted:
            scale = max(float(wanted[name].abs().max()), least)
            worst = max(worst, float((_full(gradient) - wanted[name]).abs().max()) / scale)
    return worst


def _full(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole
