"""A measurement from start to end: on forked Gloo ranks, or on those of `torchrun`.

Of the latter this process is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.errors import RunError
from autopar.runtime.launch import (
    default_backend,
    init_from_environment,
    launched,
    require_backend,
    run_ranks,
)

from .collective_times import ACROSS, GroupPlace, Key, measure_collectives, places
from .crew import Crew
from .device_times import DeviceTimes, measure_device, memory_of, repeated

TIMEOUT = 3600.0
"""Seconds that a measurement may take."""
PORT_BYTES = 2**20
"""Size of the messages that show how many devices share a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The measurements to make: collectives of `kinds` at `sizes` bytes, and the `device`.

    `steps` makes the steps of small trainings on a rank, by name; they are measured where the host
    computes and all ranks are on one. All are repeated until `settled`.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    settled: Callable[[Sequence[float]], bool]
    device: bool
    quick: bool = False
    steps: Callable[[], Mapping[object, Callable[[], object]]] = dict


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Repeated measurements in seconds on hosts of `cores`.

    steps: of small trainings, by name. port: messages of one rank of a node alone, and of all at
    once.
    """

    backend: str
    nodes: int
    per_node: int
    places: tuple[GroupPlace, ...]
    collectives: dict[Key, tuple[float, ...]]
    device: DeviceTimes | None
    port: tuple[tuple[float, ...], tuple[float, ...]] | None
    cores: int | None = None
    steps: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def ranks_at_hand(nproc: int | None) -> int:
    """The number of ranks that measure: those of a launcher, else `nproc` or one for each core."""
    place = launched()
    return place.world if place is not None else nproc or max(2, os.cpu_count() or 2)


def measure(wanted: Wanted, *, nproc: int | None, backend: str | None) -> tuple[Measurements, bool]:
    """The ranks' measurements, and whether this process reports them.

    Rank 0 of `torchrun` reports, or the forks' parent.
    """
    place = launched()
    if place is not None:
        device = init_from_environment(backend or default_backend())
        measurements = measure_on_rank(wanted, device)
        ranks = measurements.nodes * measurements.per_node
        if nproc is not None and nproc != ranks:
            raise RunError(f"{ranks} ranks run, not {nproc}")
        return measurements, place.rank == 0
    if backend == "nccl":
        require_backend(backend)
        raise RunError(
            "nccl ranks are started by torchrun:"
            " torchrun --nproc-per-node N -m autopar calibrate|bench collectives ..."
        )
    ranks = ranks_at_hand(nproc)
    return run_ranks(measure_on_rank, ranks, wanted, torch.device("cpu"), timeout=TIMEOUT)[0], True


def measure_on_rank(wanted: Wanted, device: torch.device) -> Measurements:
    """One rank of a measurement; every rank learns all of it."""
    crew = Crew(device)
    if crew.world < 2:
        raise RunError("collectives are measured on 2 ranks or more")
    # Read before any measurement, which would leave memory in use.
    memory = memory_of(crew)
    where = places(crew.node_count, crew.per_node, crew.backend)
    times = measure_collectives(crew, where, wanted.sizes, wanted.settled, wanted.kinds)
    device_times = None
    port = None
    if wanted.device:
        device_times = measure_device(crew, wanted.settled, memory=memory, quick=wanted.quick)
        port = measured_port(crew, where, wanted)
    steps: dict[object, list[float]] = {}
    if device.type == "cpu" and crew.node_count == 1:
        steps = repeated(crew, wanted.steps(), wanted.settled, captured=False)
    # A container may have fewer cores than its host; macOS does not tell.
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return Measurements(
        backend=crew.backend,
        nodes=crew.node_count,
        per_node=crew.per_node,
        places=where,
        collectives=times,
        device=device_times,
        port=port,
        cores=cores,
        steps={str(name): tuple(times) for name, times in steps.items()},
    )


def measured_port(
    crew: Crew, where: Sequence[GroupPlace], wanted: Wanted
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Times of messages between two nodes from one rank, and from all ranks of a node at once.

    None with one rank a node.
    """
    across = [
        place for place in where if (place.level, place.size) == (ACROSS, 2) and place.drivers > 1
    ]
    if not across:
        return None
    # One pair of ranks has the port to itself; the same messages from all pairs show its sharing.
    alone = replace(across[0], groups=across[0].groups[:1])
    times: list[tuple[float, ...]] = []
    for place in (alone, across[0]):
        sends = measure_collectives(crew, [place], [PORT_BYTES], wanted.settled, ["send"])
        times.extend(sends.values())
    single, together = times
    return single, together
