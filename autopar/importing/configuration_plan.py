"""A configuration planned: the best plan within its limits, and the search's own plan for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.costmodel import Cluster

from ..api import Planned, plan_loaded
from ..errors import NoPlanFits, UsageError
from ..model import LoadedModel
from ..plan_options import choose_cluster
from ..planning.ranking import Progress
from ..schemes import scheme_named
from ..schemes.pinning import stage_mesh
from .configuration import Configuration
from .huggingface import Styles

WITHOUT_LIMIT = 1e18
"""Bytes per device that no plan needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration's plan, whether it `fits` the memory, and the plan `free` of it (None: not asked, no fit)."""

    configuration: Configuration
    planned: Planned
    fits: bool
    scheme: str
    free: Planned | None


def scheme_text(found: Configuration, data: int) -> str:
    """The configuration as a product of schemes, from the outside in; "" where one device does it all.

    >>> scheme_text(Configuration(source="", zero=3, tensor=2, sequence_parallel=True, stages=4, schedule="1f1b"), 8)
    'pipeline-1f1b 4 x data 8 (zero3) x megatron-sp 2'
    """
    return " x ".join(f"{name} {size}" + (f" ({stored})" if stored else "") for name, size, stored in _factors(found, data))


def _factors(found: Configuration, data: int) -> list[tuple[str, int, str]]:
    factors = [(f"pipeline-{found.schedule or '1f1b'}", found.stages, "")] if found.stages > 1 else []
    plain = data // found.expert
    shards = plain if found.shards is None else min(found.shards // found.expert or 1, plain)
    stored = f"zero{found.zero}" if found.zero else ""
    if stored and 1 < shards < plain:
        factors += [("data", plain // shards, ""), ("data", shards, stored)]
    elif plain > 1:
        factors.append(("data", plain, stored if shards > 1 else ""))
    factors += [("expert", found.expert, "")] if found.expert > 1 else []
    factors += [("context", found.context, "")] if found.context > 1 else []
    tensor = "megatron-sp" if found.sequence_parallel else "megatron"
    return [*factors, *([(tensor, found.tensor, "")] if found.tensor > 1 and not found.styles else [])]


def import_configuration(
    found: Configuration,
    model: LoadedModel,
    *,
    devices: int | None = None,
    cluster: str | Path | Cluster | None = None,
    memory: float | None = None,
    compare: bool = True,
    progress: Progress | None = None,
) -> Imported:
    """Plan the model as the configuration says; where that exceeds the memory, without a limit, to show the excess."""
    whole = devices if found.styles else found.devices(devices)
    chosen, _ = choose_cluster(cluster, whole)
    given, called = _styled(found, chosen) if found.styles else _by_scheme(found, chosen)
    common: dict[str, Any] = {
        "cluster": chosen, "optimizer": found.optimizer or "adamw", "reduce": found.reduce, "progress": progress, "memory": memory,
    }  # fmt: skip
    batch = next((model.graph.tensors[name].shape[0] for name in model.graph.inputs if model.graph.tensors[name].shape), None)
    given["micro_batches"] = found.count(found.degree_of_data(chosen.devices), batch)
    given |= {"recompute": found.recompute, "offload": found.offload}
    given |= {"interleave": found.interleave} if found.interleave > 1 else {}
    try:
        planned, fits = plan_loaded(model, **common, **given), True
    except NoPlanFits:
        planned, fits = plan_loaded(model, **{**common, "memory": WITHOUT_LIMIT}, **given), False
    free = None
    if compare:
        try:
            free = plan_loaded(model, **common)
        except NoPlanFits:
            free = None
    return Imported(configuration=found, planned=planned, fits=fits, scheme=called, free=free)


def _by_scheme(found: Configuration, cluster: Cluster) -> tuple[dict[str, Any], str]:
    """The pins of degrees; the sequence is split around a ring, or in heads where the model lets it."""
    text = scheme_text(found, found.degree_of_data(cluster.devices))
    if found.zero is not None and found.zero > 3:
        raise UsageError(f"{found.source}: ZeRO {found.zero} is none of 0 to 3")
    given: dict[str, Any] = {"stages": found.stages}
    if not text:
        return given, "one device"
    scheme_named(text)
    # With replicas and shards, the scheme says which axis stores parameters split.
    mixed = sum(name == "data" for name, _, _ in _factors(found, found.degree_of_data(cluster.devices))) > 1
    return given | {"scheme": text} | ({} if mixed else {"zero": found.zero or 0}), text


def _styled(found: Configuration, cluster: Cluster) -> tuple[dict[str, Any], str]:
    """The pins of styles on one axis of all devices."""
    mesh = stage_mesh(cluster, [cluster.devices])
    axis = mesh.axes[0].name
    return {"mesh": mesh, "stages": 1, "pins": Styles(found.styles, axis)}, f"{len(found.styles)} styles over {axis}"
