"""Measurements of one rank while all others compute too: products, traffic of memory, launches."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .collective_times import FIRST, PASSES
from .crew import Crew

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
SMALL = 64
CHAIN = 200
COLD = 2**26
COLD_CUDA = 2**30
"""Bytes of operands, on CPUs and GPUs, between two uses of the same one: more than caches hold."""
MOST_COPIES = 64
STREAM = 2**20
STREAM_CUDA = 2**26
"""Bytes of a tensor between products."""
PARAMETERS = (2**18, 2**20) * 8
PARAMETERS_CUDA = (2**24, 2**26)
"""Elements of the parameters that a measured optimizer updates; together more than caches hold."""
UPDATED_BYTES = 21 * 4
"""Bytes that AdamW reads and writes for an element, operator by operator, in float32."""
BATCH_SECONDS = 0.02
"""Seconds that a batch of calls takes at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Repeated measurements in seconds.

    `products`: by dtype, m, n, k. `copy`, `stream`, `update`: a copy, the usual operators between
    products, and a step of AdamW, which read and write `copied`, `streamed` and `updated` bytes.
    `attention`: forward, and forward with backward, of `attention_shape`. `launch`: of one
    operator.
    """

    name: str
    products: dict[tuple[str, int, int, int], tuple[float, ...]]
    copy: tuple[float, ...]
    copied: int
    stream: tuple[float, ...]
    streamed: int
    update: tuple[float, ...]
    updated: int
    attention_shape: tuple[int, int, int, int]
    attention: dict[str, tuple[float, ...]]
    launch: tuple[float, ...]
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
    calls: dict[object, Callable[[], object]] = {
        key: _product(crew.device, room, *key) for key in wanted
    }
    source = torch.ones(room // 4, device=crew.device)
    target = torch.empty_like(source)
    calls["copy"] = lambda: target.copy_(source)
    # Between products a model adds, activates and normalises: these are the usual operators there.
    streamed, calls["stream"] = _stream(crew.device, STREAM_CUDA if cuda else STREAM)
    updated, calls["update"] = _update(crew.device, PARAMETERS_CUDA if cuda else PARAMETERS)
    calls["launch"] = _chain(crew.device)
    attention = ATTENTION_CUDA if cuda else ATTENTION
    calls["forward"] = _attention(crew.device, attention, backward=False)
    calls["backward"] = _attention(crew.device, attention, backward=True)
    times = _repeated(crew, calls, settled)
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
        capacity=memory[0],
        reserved=memory[1],
        units=torch.cuda.get_device_properties(crew.device).multi_processor_count if cuda else 0,
    )


def _wanted_products(*, cuda: bool, quick: bool) -> list[tuple[str, int, int, int]]:
    """Products to measure: all shapes in float32, one in the other types; on GPUs all in bf16."""
    shapes = (SHAPES_CUDA if cuda else SHAPES)[: QUICK if quick else None]
    largest = shapes[QUICK - 2]
    wanted = [("float32", *shape) for shape in shapes] + [(dtype, *largest) for dtype in DTYPES[1:]]
    if cuda:
        wanted += [("bfloat16", *shape) for shape in shapes if shape != largest]
    return wanted


def _repeated(
    crew: Crew,
    calls: Mapping[object, Callable[[], object]],
    settled: Callable[[Sequence[float]], bool],
) -> dict[object, list[float]]:
    """The times of every call, each repeated until it has settled.

    Repeats of one call are apart in time, so that a disturbance does not hit all of them.
    """
    times: dict[object, list[float]] = {key: [] for key in calls}
    for repeat in range(PASSES):
        for key, call in calls.items():
            if repeat < FIRST or not settled(times[key]):
                times[key].append(_on_all_ranks(crew, call))
    return times


def _product(
    device: torch.device, room: int, dtype: str, m: int, n: int, k: int
) -> Callable[[], object]:
    """A product and the two of its backward pass in turn, on operands out of the caches.

    Each has the shape m, n, k; the backward ones read one operand transposed.
    """
    number = getattr(torch, dtype)
    # As many copies as leave the caches before the first is read again.
    copies = max(1, min(room // ((m * k + k * n + m * n) * number.itemsize), MOST_COPIES))
    a = torch.ones(copies, m, k, dtype=number, device=device)
    b = torch.ones(copies, k, n, dtype=number, device=device)
    # The same shapes with the other order in memory, as the backward pass reads them.
    at = a.transpose(1, 2).contiguous().transpose(1, 2)
    bt = b.transpose(1, 2).contiguous().transpose(1, 2)
    forms = itertools.cycle(
        [(x[i], y[i]) for i in range(copies) for x, y in ((a, bt), (a, b), (at, b))]
    )

    def run() -> torch.Tensor:
        x, y = next(forms)
        return x @ y

    return run


def _stream(device: torch.device, nbytes: int) -> tuple[int, Callable[[], object]]:
    """Addition, GELU and normalisation, forward and backward; also the bytes moved.

    nbytes: the size of a tensor.
    """
    width = 256
    x = torch.linspace(-2, 2, nbytes // 4, device=device).view(-1, width).requires_grad_()
    weight = torch.ones(width, device=device, requires_grad=True)

    def run() -> object:
        y = torch.nn.functional.gelu(x + x)
        z = torch.nn.functional.layer_norm(y, (width,), weight, weight)
        return torch.autograd.grad(z, x, z.detach())

    # Tensors that the addition, GELU and the normalisation read and write.
    forward = 3 + 2 + 2
    backward = 3 + 3 + 3
    return (forward + backward) * nbytes, run


def _update(device: torch.device, sizes: Sequence[int]) -> tuple[int, Callable[[], object]]:
    """A step of AdamW, as torch takes it by default on this device; also the bytes moved."""
    parameters = [torch.nn.Parameter(torch.ones(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return UPDATED_BYTES * sum(sizes), torch.optim.AdamW(parameters).step


def _attention(
    device: torch.device, shape: tuple[int, int, int, int], *, backward: bool
) -> Callable[[], object]:
    """Causal attention in one kernel, of 16-bit numbers on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.ones(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3)
    )

    def run() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), out.detach()) if backward else out

    return run


def _chain(device: torch.device) -> Callable[[], object]:
    """`CHAIN` small operators one after another, forward and backward."""
    x = torch.ones(SMALL, device=device, requires_grad=True)

    def run() -> object:
        y = x
        for _ in range(CHAIN // 2):
            # Every operator waits for the one before it, so the time is that of starting them.
            y = y * x
        return torch.autograd.grad(y, x, y.detach())

    return run


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
