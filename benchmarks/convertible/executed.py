"""Converted Python run on ranks and compared with one device.

The largest difference of a loss and of gradients.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.launch import run_ranks

from .models import build

RANKS = 4
MICRO_BATCHES = 2
FUNCTIONS = {"dtensor": "parallelize", "fsdp2": "shard", "pipelining": "pipelined"}


def difference(name: str, target: str, text: str, data: int) -> float:
    """The largest difference of a converted model, over ranks with `data` shares of the batch."""
    return max(
        run_ranks(
            _stages if target == "pipelining" else _whole,
            RANKS,
            name,
            text,
            FUNCTIONS[target],
            data,
        )
    )


def _whole(name: str, text: str, function: str, data: int) -> float:
    whole, inputs = build(name)
    whole.eval()
    scope = dict[str, Any]()
    exec(text, scope)
    module = scope[function](copy.deepcopy(whole), "cpu")
    mine = [value.chunk(data)[torch.distributed.get_rank() * data // RANKS] for value in inputs]
    outputs = module(*mine)
    worst = float((_full(outputs) - whole(*mine)).detach().abs().max())
    outputs.float().square().mean().backward()
    _loss(whole, inputs, data).backward()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return max(
        worst,
        *(
            _gap(parameters[path].grad, value.grad)
            for path, value in whole.named_parameters()
            if value.grad is not None
        ),
    )


def _stages(name: str, text: str, function: str, data: int) -> float:
    whole, inputs = build(name)
    whole.eval()
    scope = dict[str, Any]()
    exec(text, scope)
    rank = torch.distributed.get_rank()
    last = rank // data == scope["STAGES"] - 1
    mine = [value.chunk(data)[rank % data] for value in inputs]
    example = tuple(value.chunk(MICRO_BATCHES)[0] for value in mine)
    schedule, parts = scope[function](
        copy.deepcopy(whole), example, lambda output, target: output.float().square().mean()
    )
    schedule.step(*(mine if rank < data else ()), **({"target": mine[0]} if last else {}))
    _loss(whole, inputs, data * MICRO_BATCHES).backward()
    wanted = {path: value.grad for path, value in whole.named_parameters(remove_duplicate=False)}
    gradients = [
        (path.removeprefix("module."), value.grad)
        for part in parts
        for path, value in part.named_parameters()
    ]
    return max(
        (_gap(gradient, wanted[path]) for path, gradient in gradients if wanted[path] is not None),
        default=0.0,
    )


def _loss(whole: torch.nn.Module, inputs: tuple[Tensor, ...], parts: int) -> Tensor:
    """The mean over equal parts of the batch."""
    chunks = zip(*(value.chunk(parts) for value in inputs), strict=True)
    return torch.stack([whole(*chunk).float().square().mean() for chunk in chunks]).mean()


def _gap(gradient: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference, relative to the largest element if that is above 1."""
    if gradient is None or wanted is None:
        return float("inf")
    return float((_full(gradient) - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def _full(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole
