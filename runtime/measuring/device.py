"""What one rank computes while all the others compute too: matrix products by shape, streaming of memory, launches."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .collectives import FIRST, PASSES
from .session import Session

SHAPES: tuple[tuple[int, int, int], ...] = (
    (32, 32, 32), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (1024, 256, 256), (1024, 1024, 64), (1024, 64, 1024), (64, 1024, 1024), (16, 1024, 1024), (2048, 256, 1024),
)  # fmt: skip
"""m, n, k of the matrix products on CPUs."""
SHAPES_CUDA: tuple[tuple[int, int, int], ...] = (*((m * 8, n * 8, k * 8) for m, n, k in SHAPES), (128, 4096, 4096), (4096, 4096, 128))
QUICK = 6
"""So many shapes, from the front, in a quick calibration."""
DTYPES = ("float32", "float64", "bfloat16", "float16")
SMALL = 64
CHAIN = 200
BATCH_SECONDS = 0.02
"""Seconds that a batch of calls takes at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Repeats of seconds: `products` by dtype, m, n, k; `copy` of `copied` bytes (read and written); `launch` of one operator."""

    name: str
    products: dict[tuple[str, int, int, int], tuple[float, ...]]
    copy: tuple[float, ...]
    copied: int
    launch: tuple[float, ...]
    capacity: float
    reserved: float
    units: int = 0
    """Multiprocessors of a GPU."""


def measure_device(session: Session, settled: Callable[[Sequence[float]], bool], *, quick: bool = False) -> DeviceTimes:
    """Measure on all ranks at once; the mean over the ranks counts."""
    cuda = session.device.type == "cuda"
    shapes = (SHAPES_CUDA if cuda else SHAPES)[: QUICK if quick else None]
    largest = shapes[QUICK - 2]
    wanted = [("float32", *shape) for shape in shapes] + [(dtype, *largest) for dtype in DTYPES[1:]]
    if cuda:
        wanted += [("bfloat16", *shape) for shape in shapes if shape != largest]
    calls: dict[object, Callable[[], object]] = {key: _product(session.device, *key) for key in wanted}
    copied = (2**30 if cuda else 2**26) // (4 if quick else 1)
    source = torch.ones(copied // 4, device=session.device)
    target = torch.empty_like(source)
    calls["copy"] = lambda: target.copy_(source)
    calls["launch"] = _chain(session.device)
    times: dict[object, list[float]] = {key: [] for key in calls}
    for repeat in range(PASSES):
        for key, call in calls.items():
            if repeat < FIRST or not settled(times[key]):
                times[key].append(_mean_over_ranks(session, call))
    capacity, reserved = _memory(session)
    name = torch.cuda.get_device_name(session.device) if cuda else "CPU rank"
    return DeviceTimes(
        name=name,
        products={key: tuple(times[key]) for key in wanted},
        copy=tuple(times["copy"]),
        copied=2 * copied,
        launch=tuple(seconds / CHAIN for seconds in times["launch"]),
        capacity=capacity,
        reserved=reserved,
        units=torch.cuda.get_device_properties(session.device).multi_processor_count if cuda else 0,
    )


def _product(device: torch.device, dtype: str, m: int, n: int, k: int) -> Callable[[], object]:
    a = torch.ones(m, k, dtype=getattr(torch, dtype), device=device)
    b = torch.ones(k, n, dtype=getattr(torch, dtype), device=device)
    return lambda: a @ b


def _chain(device: torch.device) -> Callable[[], object]:
    """`CHAIN` small operators that autograd records, one after another."""
    x = torch.ones(SMALL, device=device, requires_grad=True)

    def run() -> torch.Tensor:
        y = x
        for _ in range(CHAIN):
            y = y + x
        return y

    return run


def _mean_over_ranks(session: Session, call: Callable[[], object]) -> float:
    """Seconds of one call in a batch that all ranks run at the same time."""
    call()
    session.synchronize()
    started = time.perf_counter()
    call()
    session.synchronize()
    once = session.gathered(torch.tensor([time.perf_counter() - started], dtype=torch.float64))
    count = max(3, min(1000, int(BATCH_SECONDS / float(once.max()))))
    session.start()
    started = time.perf_counter()
    for _ in range(count):
        call()
    session.synchronize()
    mine = torch.tensor([(time.perf_counter() - started) / count], dtype=torch.float64)
    return float(session.gathered(mine).mean())


def _memory(session: Session) -> tuple[float, float]:
    """Bytes that a rank may have, and those that are gone before any tensor is made."""
    if session.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(session.device)
        kept = torch.cuda.memory_reserved(session.device)
        return float(total), float(total - free - kept)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return total_kib * 1024.0 / session.per_node, resident
