"""Measurements of one rank while all others compute too: products, traffic of memory, launches.

A host may start kernels more slowly than a GPU computes them. So a GPU's kernels are captured in a
CUDA graph, which runs them one behind the other without the host, and the host's own time for an
operator is a measurement of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .collective_times import FIRST, PASSES
from .crew import Crew
from .device_calls import (
    CHAIN,
    AttentionShape,
    ProductKey,
    chain_call,
    copy_call,
    kernel_calls,
    stream_call,
    update_call,
)

SHAPES: tuple[tuple[int, int, int], ...] = (
    (32, 32, 32),
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (1024, 256, 256),
    (1024, 1024, 64),
    (1024, 64, 1024),
    (64, 1024, 1024),
    (16, 1024, 1024),
    (2048, 256, 1024),
)
"""m, n, k of the matrix products on CPUs."""
SHAPES_CUDA: tuple[tuple[int, int, int], ...] = (
    *((m * 8, n * 8, k * 8) for m, n, k in SHAPES),
    (128, 4096, 4096),
    (4096, 4096, 128),
)
QUICK = 6
"""The number of shapes, from the front, in a quick calibration."""
DTYPES = ("float32", "float64", "bfloat16", "float16")
ATTENTION = (4, 4, 256, 64)
ATTENTION_CUDA = (8, 16, 2048, 64)
"""Batch, heads, sequence and width of the measured attention."""
COLD = 2**26
COLD_CUDA = 2**30
"""Bytes of operands, on CPUs and GPUs, between two uses of the same one: more than caches hold."""
STREAM = 2**20
STREAM_CUDA = 2**26
"""Bytes of a tensor between products."""
PARAMETERS = (2**18, 2**20) * 8
PARAMETERS_CUDA = (2**24, 2**26)
"""Elements of the parameters that a measured optimizer updates; together more than caches hold."""
BATCH_SECONDS = 0.02
"""Seconds that a batch of calls takes at least."""
CAPTURED = 16
"""Calls in a CUDA graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Repeated measurements in seconds.

    `products`: by dtype, m, n, k. `copy`, `stream`, `update`: a copy, the usual operators between
    products, and a step of AdamW, which read and write `copied`, `streamed` and `updated` bytes.
    `attention`: forward, and forward with backward, of `attention_shape`. `launch`: of one operator
    on the device. `dispatch`: of one operator on the host of a GPU; empty where the host computes.
    """

    name: str
    products: dict[ProductKey, tuple[float, ...]]
    copy: tuple[float, ...]
    copied: int
    stream: tuple[float, ...]
    streamed: int
    update: tuple[float, ...]
    updated: int
    attention_shape: AttentionShape
    attention: dict[str, tuple[float, ...]]
    launch: tuple[float, ...]
    dispatch: tuple[float, ...]
    capacity: float
    reserved: float
    units: int = 0
    """Multiprocessors of a GPU."""


def measure_device(
    crew: Crew,
    settled: Callable[[Sequence[float]], bool],
    *,
    memory: tuple[float, float],
    quick: bool = False,
) -> DeviceTimes:
    """Measure on all ranks at once; the slowest counts, since ranks may take turns on a core.

    memory: capacity and reserved bytes.
    """
    cuda = crew.device.type == "cuda"
    wanted = _wanted_products(cuda=cuda, quick=quick)
    room = COLD_CUDA if cuda else COLD
    attention = ATTENTION_CUDA if cuda else ATTENTION
    calls = kernel_calls(crew.device, wanted, room, attention)
    streamed, calls["stream"] = stream_call(crew.device, STREAM_CUDA if cuda else STREAM)
    times = repeated(crew, calls, settled, captured=cuda)
    updated, update = update_call(crew.device, PARAMETERS_CUDA if cuda else PARAMETERS)
    # An optimizer counts its steps on the host, which a graph would not; and in a graph a copy of
    # 1 GiB took half as long again on an H200.
    hosted: dict[object, Callable[[], object]] = {
        "update": update,
        "copy": copy_call(crew.device, room),
    }
    if cuda:
        hosted["dispatch"] = chain_call(crew.device)
    times.update(repeated(crew, hosted, settled, captured=False))
    name = torch.cuda.get_device_name(crew.device) if cuda else "CPU rank"
    return DeviceTimes(
        name=name,
        products={key: tuple(times[key]) for key in wanted},
        copy=tuple(times["copy"]),
        copied=2 * room,
        stream=tuple(times["stream"]),
        streamed=streamed,
        update=tuple(times["update"]),
        updated=updated,
        attention_shape=attention,
        attention={direction: tuple(times[direction]) for direction in ("forward", "backward")},
        launch=tuple(seconds / CHAIN for seconds in times["launch"]),
        dispatch=tuple(seconds / CHAIN for seconds in times.get("dispatch", ())),
        capacity=memory[0],
        reserved=memory[1],
        units=torch.cuda.get_device_properties(crew.device).multi_processor_count if cuda else 0,
    )


def _wanted_products(*, cuda: bool, quick: bool) -> list[ProductKey]:
    """Products to measure: all shapes in float32, one in the other types; on GPUs all in bf16."""
    shapes = (SHAPES_CUDA if cuda else SHAPES)[: QUICK if quick else None]
    largest = shapes[QUICK - 2]
    wanted = [("float32", *shape) for shape in shapes] + [(dtype, *largest) for dtype in DTYPES[1:]]
    if cuda:
        wanted += [("bfloat16", *shape) for shape in shapes if shape != largest]
    return wanted


def repeated(
    crew: Crew,
    calls: Mapping[object, Callable[[], object]],
    settled: Callable[[Sequence[float]], bool],
    *,
    captured: bool,
) -> dict[object, list[float]]:
    """The times of every call, each repeated until it has settled.

    Repeats of one call are apart in time, so that a disturbance does not hit all of them.
    `captured`: the calls are made from CUDA graphs.
    """
    times: dict[object, list[float]] = {key: [] for key in calls}
    each = CAPTURED if captured else 1
    batches = {key: _captured(call) if captured else call for key, call in calls.items()}
    for repeat in range(PASSES):
        for key, batch in batches.items():
            if repeat < FIRST or not settled(times[key]):
                times[key].append(_on_all_ranks(crew, batch) / each)
    return times


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """`CAPTURED` calls as a CUDA graph."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    # What a first call allocates and chooses must not be captured.
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            call()
    replay: Callable[[], object] = graph.replay
    return replay


def _on_all_ranks(crew: Crew, call: Callable[[], object]) -> float:
    """Seconds of a call in a batch that all ranks run at the same time, on the slowest of them."""
    # The first call allocates memory and chooses kernels, so it is not counted.
    call()
    crew.synchronize()
    started = time.perf_counter()
    call()
    crew.synchronize()
    # All ranks must take the same number of calls, or one would measure alone.
    once = crew.gathered(torch.tensor([time.perf_counter() - started], dtype=torch.float64))
    count = max(3, min(1000, int(BATCH_SECONDS / float(once.max()))))
    # The common start, since this rank may run only after another's turn on the same core.
    started = crew.start()
    for _ in range(count):
        call()
    crew.synchronize()
    mine = torch.tensor([(crew.now() - started) / count], dtype=torch.float64)
    return float(crew.gathered(mine).max())


def memory_of(crew: Crew) -> tuple[float, float]:
    """Bytes that a rank may use, and bytes in use before any measurement.

    These are the least and the most over all ranks.
    """
    if crew.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(crew.device)
        mine = (total, total - free - torch.cuda.memory_reserved(crew.device))
    else:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) * 1024
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        # Ranks of a node share its memory.
        mine = (total // crew.per_node, pages * os.sysconf("SC_PAGE_SIZE"))
    ranks = crew.gathered(torch.tensor(mine, dtype=torch.float64))
    return float(ranks[:, 0].min()), float(ranks[:, 1].max())
