"""The parts of a report on a machine with GPUs: measurements beside what is predicted of them.

    python -m tests.gpu.sections NAME DEVICE FILE

runs one part as one rank, or as one of those that torchrun has started, and rank 0 writes the rows
into the file. DEVICE is cuda; with cpu the same lines run on a machine without GPUs, as a test.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from autopar.analysis.measurements.doctor import PLANS, compared_plans
from autopar.api import plan_loaded
from autopar.costmodel import default_cluster
from autopar.costmodel.calibration.collective_curves import settled
from autopar.costmodel.device.elementwise import memory_seconds
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.products import Product
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.runtime.launch import init_alone, init_from_environment, launched
from autopar.runtime.launch.devices import remember
from autopar.runtime.measuring.crew import Crew
from autopar.runtime.measuring.device_times import measure_device, memory_of
from autopar.runtime.parallelize import parallelize

WARM = 3
TIMED = 5
TOLERANCE = 0.1
"""The relative spread at which a measurement of a kernel has settled."""
SCHEMES: dict[str, dict[str, Any]] = {
    "data": {"scheme": "data"},
    "zero3": {"scheme": "zero3"},
    "megatron": {"scheme": "megatron"},
    "1f1b": {"stages": 2, "micro_batches": 4, "schedule": "1f1b"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A result: whether it is right, with a figure beside the predicted one where there is one.

    `unit`: "s" or "bytes".
    """

    what: str
    ok: bool = True
    said: str = ""
    unit: str = ""
    measured: float | None = None
    predicted: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of the network whose steps are timed."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int


SIZES = {
    "cuda": Size(layers=8, width=1024, heads=16, vocabulary=16384, batch=8, sequence=1024),
    "cpu": Size(layers=2, width=64, heads=4, vocabulary=128, batch=8, sequence=16),
}


class Layer(nn.Module):
    """A layer of a transformer, with causal attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.query = nn.Linear(size.width, size.width)
        self.key = nn.Linear(size.width, size.width)
        self.value = nn.Linear(size.width, size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, of the shape of its input: batch, sequence, width."""
        h = self.norms[0](x)
        query, key, value = (
            part(h).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Network(nn.Module):
    """A language model with its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the labels."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


def kernels(device: str) -> list[Row]:
    """The kernels of a calibration beside their prices on the machine's preset."""
    init_alone("gloo")
    crew = Crew(torch.device(device, 0) if device == "cuda" else torch.device(device))
    agreed = partial(settled, tolerance=TOLERANCE)
    times = measure_device(crew, agreed, memory=memory_of(crew), quick=True)
    priced = default_cluster()[0].device if device == "cuda" else None
    rows = []
    for (dtype, m, n, k), seconds in times.products.items():
        predicted = None
        if priced is not None:
            product = Product(batch=np.ones(1), m=np.array([m]), n=np.array([n]), k=np.array([k]))
            itemsize = getattr(torch, dtype).itemsize
            predicted = float(product_seconds(product, dtype, priced, itemsize=itemsize)[0])
        rows.append(_seconds(f"product {dtype} {m} x {n} x {k}", seconds, predicted))
    copied = None if priced is None else float(memory_seconds(times.copied, priced))
    rows.append(_seconds(f"copy, {times.copied} bytes moved", times.copy, copied))
    rows.append(_seconds(f"elementwise, {times.streamed} bytes moved", times.stream, None))
    rows.append(_seconds(f"AdamW, {times.updated} bytes moved", times.update, None))
    for direction, repeats in times.attention.items():
        rows.append(_seconds(f"attention {direction} {times.attention_shape}", repeats, None))
    starts = (None, None) if priced is None else (priced.launch, priced.dispatch)
    rows.append(_seconds("start of a kernel", times.launch, starts[0]))
    if times.dispatch:
        rows.append(_seconds("operator of the host", times.dispatch, starts[1]))
    return rows


def one_device(device: str) -> list[Row]:
    """A plan on one device: as without a plan, and its step beside the prediction."""
    backend = "nccl" if device == "cuda" else "gloo"
    init_alone(backend)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    return [*_compared(1, backend), *_timed("one device", {"mesh": (1,)}, device)]


def gloo(device: str) -> list[Row]:
    """Ranks over Gloo, all with tensors on the first device: one GPU plays several.

    Gloo reduces and gathers tensors of GPUs, but sends none, so pipelines are left out.
    """
    if device == "cpu":
        init_from_environment("gloo")
    else:
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:gloo")
        # The only case in which ranks share a device, so nothing compares theirs.
        remember(torch.device(device, 0))
    rows = _compared(dist.get_world_size(), "gloo", unstaged=True)
    return [*rows, Row(what="pipelines", said="left out: Gloo sends no tensors of GPUs")]


def nccl(device: str) -> list[Row]:
    """Ranks on a GPU each, over NCCL."""
    backend = "nccl" if device == "cuda" else "gloo"
    init_from_environment(backend)
    rows = _compared(dist.get_world_size(), backend)
    if dist.get_world_size() > 1:
        for name, options in SCHEMES.items():
            rows += _timed(name, options, device)
    return rows


SECTIONS: dict[str, Callable[[str], list[Row]]] = {
    "kernels": kernels,
    "one device": one_device,
    "gloo": gloo,
    "nccl": nccl,
}


def _compared(ranks: int, backend: str, *, unstaged: bool = False) -> list[Row]:
    """The plans of the doctor beside one device; `unstaged`: those without stages."""
    plans = [plan for plan in PLANS if not (unstaged and "stages" in plan[1])]
    return [
        Row(what=f"{one.plan}, as one device", ok=one.ok, said=one.said)
        for one in compared_plans(ranks, backend, quick=True, plans=plans)
    ]


def _timed(name: str, options: dict[str, Any], device: str) -> list[Row]:
    """The step and the memory of a training beside what is predicted of them."""
    size = SIZES[device]
    try:
        loaded = _loaded(size, device)
        cluster = None if device == "cuda" else "local-cpu"
        world = dist.get_world_size()
        plan = plan_loaded(loaded, devices=world, cluster=cluster, **options).plan
        seconds, busy, peak, losses = _trained(loaded, plan, device)
    except Exception as error:
        # Whatever fails is a result; the other parts are still tried.
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return [Row(what=f"{name}, a training", ok=False, said=said)]
    falls = losses[-1] < losses[0]
    said = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    rows = [
        Row(what=f"{name}, a training", ok=falls, said=said),
        _seconds(f"{name}, a step", seconds, plan.predicted.step),
    ]
    if busy is not None:
        # Where the host starts kernels slowly, the step takes longer than they do.
        rows.append(_seconds(f"{name}, kernels of a step", [busy], plan.predicted.step))
    if peak is not None:
        memory = plan.predicted.memory
        what = f"{name}, memory of rank 0"
        rows.append(Row(what=what, unit="bytes", measured=peak, predicted=memory))
    return rows


def _loaded(size: Size, device: str) -> LoadedModel:
    """The network with a batch of it, in bfloat16 on a GPU."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = torch.randint(size.vocabulary, (size.batch, size.sequence))
        dtype = "bfloat16" if device == "cuda" else None
        options = ModelOptions(train=True, dtype=dtype)
        return load_model(Network(size), options, (tokens, tokens.roll(-1, 1)))


def _trained(
    loaded: LoadedModel, plan: Plan, device: str
) -> tuple[list[float], float | None, float | None, list[float]]:
    """Seconds of steps, those of a GPU's kernels, its peak of memory, and the losses of steps."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    module = parallelize(lambda: (loaded, plan))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    assert loaded.inputs is not None
    batch = tuple(value.to(module.engine.device) for value in loaded.inputs)
    losses = []
    seconds = []
    for _ in range(WARM + TIMED):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = module.train_step(batch, optimizer)
        # Reading the loss waits for the device, but not for the update behind it.
        losses.append(float(loss))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = float(torch.cuda.max_memory_allocated() - before) if cuda else None
    busy = _kernel_seconds(lambda: module.train_step(batch, optimizer)) if cuda else None
    return seconds[WARM:], busy, peak, losses


def _kernel_seconds(step: Callable[[], object]) -> float:
    """Seconds in which a GPU runs the kernels of a step."""
    from torch.autograd import DeviceType

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    kernels = (
        event.self_device_time_total
        for event in profiled.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    return 1e-6 * float(sum(kernels))


def _seconds(what: str, repeats: Any, predicted: float | None) -> Row:
    measured = statistics.median(repeats)
    return Row(what=what, unit="s", measured=measured, predicted=predicted)


def main(arguments: list[str]) -> None:
    """Run a part and write its rows."""
    name, device, path = arguments
    rows = SECTIONS[name](device)
    place = launched()
    if place is None or place.rank == 0:
        text = json.dumps([dataclasses.asdict(row) for row in rows])
        Path(path).write_text(text, encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
