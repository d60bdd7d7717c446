"""The errors of a search without a plan: what would do, and what to change."""

from __future__ import annotations

import math

from autopar.errors import NoPlanFits, UsageError
from autopar.planning.model.request import HEADROOM, WITHOUT_LIMIT
from autopar.search import Infeasible

from .best_first import BestFirst
from .thriftiest import least_hosted


def no_candidate(search: BestFirst) -> UsageError:
    """The error where there is no candidate at all."""
    request = search.request
    devices = request.cluster.devices
    if search.forbidden:
        where = "on any mesh of these devices"
        if request.mesh is not None:
            where = f"on the mesh {request.mesh}"
        return UsageError(f"the pins leave no strategy for some operator {where}")
    if request.micro_batches not in (None, 1):
        reason = search.folded.why_not(request.micro_batches)
        reason = reason or "the stages, or their schedule, cannot run them"
        return UsageError(f"{request.micro_batches} micro-batches: {reason}")
    if request.stages is not None:
        # The passes of a pipeline are those of micro-batches.
        whole = search.folded.why_not(2) if devices % request.stages == 0 else ""
        if whole:
            return UsageError(f"{request.stages} stages: {whole}")
        layers = "or are more than the layers of the model"
        return UsageError(f"{request.stages} stages do not divide {devices} devices, {layers}")
    if request.mesh is not None:
        return UsageError(f"the mesh {request.mesh} does not have {devices} devices")
    # Only a space that demands stages leaves no candidate where nothing else is asked for.
    reason = search.folded.why_not(2) or f"no cut of the model does on {devices} devices"
    return UsageError(f"the plan must have pipeline stages: {reason}")


def nothing_fits(search: BestFirst, failures: list[Infeasible]) -> NoPlanFits | UsageError:
    """The error where no program fits the memory; `failures`: of the programs that were made."""
    request = search.request
    solver = search.solver
    limit = request.memory_limit
    if limit >= WITHOUT_LIMIT:
        chunks = f" of {request.interleave} chunks" if request.interleave else ""
        return UsageError(
            f"{request.stages} stages{chunks}: the model cannot be cut into so many at the places "
            "that are asked for"
        )
    # The needs of pipelines are estimated, not shown by a plan: they are named only where there is
    # nothing else.
    estimated = [misfit.needed + solver.always for misfit in search.misfits]
    shown = [error.minimum_memory for error in failures]
    needed = min(shown, default=min(estimated, default=limit))
    held = request.host_on(request.cluster)
    if request.offload == "optimizer" and math.isfinite(held):
        hosted = least_hosted(solver)
        if hosted > held or math.isinf(needed):
            said = _hosts_too_small(request.cluster.devices, hosted, held)
            return NoPlanFits(said, minimum=max(needed, limit), memory_limit=limit)
    said = f"{_too_little(search, needed)} {_instead(search, held)}"
    return NoPlanFits(said, minimum=max(needed, limit), memory_limit=limit)


def _hosts_too_small(devices: int, hosted: float, held: float) -> str:
    return (
        f"no plan fits the hosts on {devices} devices: the optimizer's state takes at least "
        f"{_size(hosted)} of host memory for each device, and {_size(held)} are there. "
        "Give more devices, --optimizer sgd, or let some of it stay on the devices "
        "(without --offload)."
    )


def _too_little(search: BestFirst, needed: float) -> str:
    request = search.request
    limit = request.memory_limit
    spare = ""
    if request.memory is None:
        free = _size(request.cluster.device.usable_memory)
        spare = f" ({free} but for {HEADROOM:.0%} of headroom, which --memory overrules)"
    # A need that is larger by rounding alone would be printed like the limit.
    enough = "a little more would do"
    if _size(needed) != _size(limit):
        enough = f"the smallest that would do is {_size(needed)}"
    where = f"on {request.cluster.devices} devices"
    return f"no plan fits {_size(limit)} per device{spare} {where}; {enough}."


def _instead(search: BestFirst, held: float) -> str:
    request = search.request
    said = "Give more devices or memory, a smaller --batch, or --optimizer sgd."
    if request.offload == "optimizer" and math.isfinite(held):
        said += (
            f" With --offload optimizer all its state has to fit the {_size(held)} of host "
            "memory for each device."
        )
    if master := request.types.master:
        said += f" Parameters in the type of the computation (--master) take less than in {master}."
    return said


def _size(nbytes: float) -> str:
    """Bytes rounded up to three digits, so that the size named is enough."""
    if math.isinf(nbytes):
        return "any memory"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{math.ceil(nbytes / unit * 1000) / 1000:.3f} {name}"
    return f"{math.ceil(nbytes)} bytes"
