"""Runs a case on forked ranks and the whole module, and collects differences in operators, outputs and gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # DTensor needs it in every rank, where its import would take seconds
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ..launch import run_ranks
from .case import Case, mean_of_squares
from .watching import Finding, Watch, close, difference, scaled_by

SEED = 7
TIMEOUT = 300.0
_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The findings of a case (none: right). `checked`: operators on DTensors; `random`: those with random numbers."""

    name: str
    mesh: tuple[int, ...]
    ok: bool
    checked: int
    random: int
    gradients: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Loss and gradients of the whole module."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


def verify(case: Case) -> Verdict:
    """Execute a case."""
    # A process that has run a backward pass cannot be forked, so the whole has a rank of its own, alone in its world.
    (whole,) = run_ranks(_one_device, 1, case, timeout=TIMEOUT)
    found = run_ranks(_rank, torch.Size(case.mesh).numel(), case, whole, timeout=TIMEOUT)
    checked, random, gradients, findings, notes = found[0]
    for _, _, _, others, _ in found[1:]:  # a rank that differs by itself has findings of its own
        known = {(one.operator, one.what) for one in findings}
        findings = [*findings, *(one for one in others if (one.operator, one.what) not in known)]
    return Verdict(
        name=case.name, mesh=case.mesh, ok=not findings, checked=checked, random=random, gradients=gradients, findings=tuple(findings),
        notes=tuple(notes),
    )  # fmt: skip


def _one_device(case: Case) -> _Whole:
    """The whole module's step."""
    torch.manual_seed(SEED)
    module = copy.deepcopy(case.module)
    loss = (case.loss or mean_of_squares)(module, *case.inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return _Whole(loss=loss.detach(), gradients=gradients)


def _rank(case: Case, whole: _Whole) -> tuple[int, int, int, list[Finding], list[str]]:
    """The findings of one rank."""
    torch.manual_seed(SEED)
    mesh = init_device_mesh("cpu", case.mesh)
    module = copy.deepcopy(case.module)
    sharded = case.parallelize(module, mesh)
    sharded = sharded if isinstance(sharded, nn.Module) else module
    watch = Watch()
    watch.named(sharded)
    loss, failure = None, None
    try:
        with watch:
            loss = (case.loss or mean_of_squares)(sharded, *case.inputs)
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        failure = error
    findings = list(watch.findings.values())
    notes, compared = [], 0
    if loss is None or failure is not None:
        where = watch.running or "the sharded module"
        findings.append(Finding(operator=where, where="", shape=(), layouts="", error=0.0, what=f"raises {_first_line(failure)}"))
    elif watch.random:
        notes.append("the model draws random numbers: its loss and gradients are not compared with the whole, only its operators are")
    else:
        findings += _of_loss(loss, whole)
        own, compared = _of_gradients(sharded, whole)
        findings += own
    return watch.checked, watch.random, compared, findings, notes


def _of_loss(loss: Tensor, whole: _Whole) -> list[Finding]:
    """Compare the loss with that of the whole, directly or as the mean over ranks."""
    made = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
    if close(made, whole.loss):
        return []
    mean = made.clone()
    dist.all_reduce(mean)
    if close(mean / dist.get_world_size(), whole.loss):
        return []
    return [_finding("the loss", whole.loss, difference(made, whole.loss), "it is not that of the whole", "")]


def _of_gradients(module: nn.Module, whole: _Whole) -> tuple[list[Finding], int]:
    """Every parameter's gradient against that of the whole; how many were compared."""
    findings, compared = [], 0
    for name, parameter in module.named_parameters():
        right = whole.gradients.get(_WRAPPED.sub("", name))
        if right is None or parameter.grad is None:
            if right is not None and parameter.requires_grad:
                findings.append(_finding(f"the gradient of {name}", right, 0.0, "there is none", ""))
            continue
        gradient = parameter.grad
        layouts = " ".join(map(str, gradient.placements)) if isinstance(gradient, DTensor) else ""
        made = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        compared += 1
        if made.shape != right.shape:
            if isinstance(parameter, DTensor):
                findings.append(_finding(f"the gradient of {name}", right, 0.0, f"its shards make {tuple(made.shape)}", layouts))
            compared -= 1
            continue
        if not close(made, right):
            ratio = scaled_by(made, right)
            what = f"it is {ratio:.3g} times that of the whole" if ratio else "it is not that of the whole"
            findings.append(_finding(f"the gradient of {name}", right, difference(made, right), what, layouts))
    return findings, compared


def _first_line(error: Exception | None) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _finding(operator: str, right: Tensor, error: float, what: str, layouts: str) -> Finding:
    return Finding(operator=operator, where="", shape=tuple(right.shape), layouts=layouts, error=error, what=what)


def verdict_json(found: Verdict) -> dict[str, Any]:
    """The verdict as plain values."""
    return {
        "name": found.name, "mesh": list(found.mesh), "ok": found.ok, "checked": found.checked, "random": found.random,
        "gradients": found.gradients, "notes": list(found.notes),
        "findings": [
            {"operator": f.operator, "where": f.where, "shape": list(f.shape), "layouts": f.layouts, "error": f.error, "what": f.what}
            for f in found.findings
        ],
    }  # fmt: skip
