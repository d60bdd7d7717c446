"""Execution of a case on forked ranks, beside the whole module on one rank.

The differences in operators, outputs and gradients make the verdict.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# DTensor needs it in every rank, where its import would take seconds.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.runtime.launch import run_ranks
from autopar.runtime.parameters.dtensor_draws import torchs_own_draws

from .case import Case
from .operator_watch import Finding, Watch, close, difference, scaled_by

SEED = 7
TIMEOUT = 300.0
# Wrappers of torch put these names into those of parameters.
_WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The findings of a case; it is right if there are none.

    checked: the number of operators on DTensors. random: of those, how many draw random numbers.
    gradients: the number of gradients compared with the whole.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The findings of one rank."""

    checked: int
    random: int
    gradients: int
    findings: list[Finding]
    notes: list[str]


def verify(case: Case) -> Verdict:
    """Execute a case, on one rank for the whole and on the ranks of its mesh."""
    # A process that has run a backward pass cannot be forked, so the whole has a rank of its own,
    # alone in its world.
    (whole,) = run_ranks(_one_device, 1, case, timeout=TIMEOUT)
    ranks = torch.Size(case.mesh).numel()
    reports: list[_Report] = run_ranks(_rank, ranks, case, whole, timeout=TIMEOUT)
    findings = list(reports[0].findings)
    # A rank that differs by itself has findings of its own; the others repeat those of the first.
    for report in reports[1:]:
        known = {(finding.operator, finding.what) for finding in findings}
        findings += [
            finding for finding in report.findings if (finding.operator, finding.what) not in known
        ]
    return Verdict(
        name=case.name,
        mesh=case.mesh,
        ok=not findings,
        checked=reports[0].checked,
        random=reports[0].random,
        gradients=reports[0].gradients,
        findings=tuple(findings),
        notes=tuple(reports[0].notes),
    )


def _one_device(case: Case) -> _Whole:
    """The whole module's step."""
    torch.manual_seed(SEED)
    module = copy.deepcopy(case.module)
    loss = case.loss_of(module)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return _Whole(loss=loss.detach(), gradients=gradients)


def _rank(case: Case, whole: _Whole) -> _Report:
    """Execute the sharded module on one rank, and compare it with the whole."""
    torch.manual_seed(SEED)
    mesh = init_device_mesh("cpu", case.mesh)
    module = copy.deepcopy(case.module)
    sharded = case.parallelize(module, mesh)
    sharded = sharded if isinstance(sharded, nn.Module) else module
    watch = Watch()
    watch.named(sharded)
    loss = None
    failure = None
    try:
        with torchs_own_draws(), watch:
            loss = case.loss_of(sharded)
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        failure = error
    findings = list(watch.findings.values())
    notes = []
    compared = 0
    if loss is None or failure is not None:
        operator = watch.running or "the sharded module"
        findings.append(_finding(operator, (), f"raises {_first_line(failure)}"))
    elif watch.random:
        notes.append(
            "the model draws random numbers: its loss and gradients are not compared"
            " with the whole, only its operators are"
        )
    else:
        findings += _of_loss(loss, whole)
        own, compared = _of_gradients(sharded, whole)
        findings += own
    return _Report(
        checked=watch.checked,
        random=watch.random,
        gradients=compared,
        findings=findings,
        notes=notes,
    )


def _of_loss(loss: Tensor, whole: _Whole) -> list[Finding]:
    """Compare the loss with that of the whole, directly or as the mean over ranks."""
    own = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
    if close(own, whole.loss):
        return []
    mean = own.clone()
    # Every rank may have the loss of its own part of the batch.
    dist.all_reduce(mean)
    if close(mean / dist.get_world_size(), whole.loss):
        return []
    error = difference(own, whole.loss)
    return [_finding("the loss", whole.loss.shape, "it is not that of the whole", error=error)]


def _of_gradients(module: nn.Module, whole: _Whole) -> tuple[list[Finding], int]:
    """Compare every parameter's gradient with that of the whole; also how many were compared."""
    findings = []
    compared = 0
    for name, parameter in module.named_parameters():
        right = whole.gradients.get(_WRAPPED.sub("", name))
        if right is None:
            continue
        operator = f"the gradient of {name}"
        if parameter.grad is None:
            if parameter.requires_grad:
                findings.append(_finding(operator, right.shape, "there is none"))
            continue
        gradient = parameter.grad
        layouts = ""
        own = gradient
        if isinstance(gradient, DTensor):
            layouts = " ".join(map(str, gradient.placements))
            own = gradient.full_tensor()
        if own.shape != right.shape:
            # A plain parameter of another shape is a part that somebody cut by hand.
            if isinstance(parameter, DTensor):
                fault = f"its shards make {tuple(own.shape)}"
                findings.append(_finding(operator, right.shape, fault, layouts=layouts))
            continue
        compared += 1
        if not close(own, right):
            ratio = scaled_by(own, right)
            fault = "it is not that of the whole"
            if ratio:
                fault = f"it is {ratio:.3g} times that of the whole"
            error = difference(own, right)
            findings.append(_finding(operator, right.shape, fault, error=error, layouts=layouts))
    return findings, compared


def _first_line(error: Exception | None) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _finding(
    operator: str, shape: Sequence[int], what: str, *, error: float = 0.0, layouts: str = ""
) -> Finding:
    """A finding about the module as a whole."""
    return Finding(
        operator=operator, where="", shape=tuple(shape), layouts=layouts, error=error, what=what
    )


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain values."""
    return {
        "name": verdict.name,
        "mesh": list(verdict.mesh),
        "ok": verdict.ok,
        "checked": verdict.checked,
        "random": verdict.random,
        "gradients": verdict.gradients,
        "notes": list(verdict.notes),
        "findings": [
            {**dataclasses.asdict(finding), "shape": list(finding.shape)}
            for finding in verdict.findings
        ],
    }
