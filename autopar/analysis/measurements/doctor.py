"""The diagnosis of a machine: plans compared with one device, and the bandwidth of its ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError, NoisyMeasurement

SIZES = (4 * 2**10, 2**20, 16 * 2**20)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PlanRow = tuple[str, dict[str, Any], int]
PLANS: tuple[PlanRow, ...] = (
    ("one device", {"mesh": (1,)}, 1),
    ("data", {"scheme": "data"}, 2),
    ("zero3", {"scheme": "zero3"}, 2),
    ("megatron", {"scheme": "megatron"}, 2),
    ("1f1b", {"stages": 2, "micro_batches": 2, "schedule": "1f1b"}, 2),
)
"""The name, the planning options, and the fewest ranks of each plan to run."""
LARGE: dict[str, Any] = {"stages": 2, "micro_batches": 2, "schedule": "1f1b"}
"""The planning options of a pipeline whose messages have `MESSAGE` bytes on two ranks."""
MESSAGE = 64 * 2**20
BATCH = 8
WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """A plan compared with one device.

    `said`: the differences, or the reason why it did not run.
    """

    plan: str
    ok: bool
    said: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The results on one machine.

    `bandwidth`: rows of collective, bytes, seconds, bytes a second. `silent`: why there are none.
    """

    backend: str
    ranks: int
    parity: tuple[Parity, ...]
    bandwidth: tuple[tuple[str, int, float, float], ...]
    silent: str

    @property
    def ok(self) -> bool:
        """Whether every plan computed the same as one device."""
        return all(one.ok for one in self.parity)


def doctor(*, nproc: int | None, quick: bool) -> Diagnosis | None:
    """Inspect, measure and run.

    On GPUs the ranks are those of a launcher (`relaunched`). None on all ranks except one.
    """
    import torch

    from autopar.runtime.launch import launched

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    place = launched()
    ranks = nproc or 2 if place is None else place.world
    backend = "nccl" if gpus else "gloo"
    bandwidth, silent = (
        ((), "one rank has nobody to talk to") if ranks < 2 else _bandwidth(ranks, backend, quick)
    )
    # After the measurement, which makes the process group under torchrun.
    parity = compared_plans(ranks, backend, quick=quick, plans=PLANS)
    if not quick and ranks > 1:
        # Ranks of a launcher have their backend; forked ones may have the strict one.
        forked = backend == "gloo" and place is None
        parity += _by_nccls_rules(ranks, "strict" if forked else backend)
    if place is not None and place.rank != 0:
        return None
    return Diagnosis(
        backend=backend, ranks=ranks, parity=parity, bandwidth=bandwidth, silent=silent
    )


def compared_plans(
    ranks: int, backend: str, *, quick: bool, plans: Sequence[PlanRow]
) -> tuple[Parity, ...]:
    """The plans that so many ranks can run, each compared with one device."""
    return tuple(
        _run(name, options, ranks, backend, quick)
        for name, options, least in plans
        if ranks >= least
    )


def _model() -> tuple[Any, Any]:
    """A small model with attention, a norm, tied weights and a loss; and a batch of it."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            h = self.norm(x)
            q, k, v = (
                part(h).view(*h.shape[:2], WIDTH // 8, 8).transpose(1, 2)
                for part in (self.query, self.key, self.value)
            )
            x = x + self.out(
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .flatten(2)
            )
            x = x + self.down(functional.gelu(self.up(x)))
            return functional.cross_entropy(
                (x @ self.embed.weight.T).flatten(0, 1), tokens.roll(-1, 1).flatten()
            )

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(), (torch.randint(0, WIDTH, (BATCH, 16)),)


def _wide(ranks: int) -> tuple[Any, Any]:
    """A model that is as wide wherever it is cut, and a batch of two messages for two ranks."""
    import torch
    from torch import Tensor, nn

    width = 64 * WIDTH

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, width)
            self.gain = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            rows = (torch.tanh(y := self.up(x)) + y) * self.gain
            return torch.softmax(rows, -1).square().mean()

    rows = MESSAGE // (4 * width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Wide(), (torch.randn(2 * rows * max(1, ranks // 2), WIDTH),)


def _by_nccls_rules(ranks: int, backend: str) -> tuple[Parity, ...]:
    """The plans on a backend where a send waits for its receive, and one with large messages.

    Gloo and NCCL take small messages before they are received, which hides a deadlock.
    """
    # Another backend has run the small plans.
    small = PLANS[1:] if backend == "strict" else ()
    large = f"1f1b, {MESSAGE // 2**20} MiB messages"
    return (
        *(_run(f"{name}, {backend}", options, ranks, backend, False) for name, options, _ in small),
        _run(f"{large}, {backend}", LARGE, ranks, backend, False, _wide(ranks)),
    )


def _run(
    name: str,
    options: dict[str, Any],
    ranks: int,
    backend: str,
    quick: bool,
    case: tuple[Any, Any] | None = None,
) -> Parity:
    """Plan, run, and compare with one device; `case`: a module and its inputs."""
    from autopar.api import plan_loaded
    from autopar.configured import load_any
    from autopar.frontends.load import ModelOptions
    from autopar.runtime.run import run_plan

    began = time.perf_counter()
    module, inputs = case or _model()
    try:
        loaded = load_any(module, ModelOptions(train=True), inputs)
        devices = 1 if options.get("mesh") == (1,) else ranks
        plan = plan_loaded(
            loaded, devices=devices, cluster=None if backend == "nccl" else "local-cpu", **options
        ).plan
        report = run_plan(loaded, plan, steps=1 if quick else 2, check=True, backend=backend)
        ok = report.ok
        said = report.check
    except (AutoparError, RuntimeError, OSError) as error:
        # A plan that does not run is a result of the diagnosis; the others are still tried.
        ok = False
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return Parity(plan=name, ok=ok, said=said, seconds=time.perf_counter() - began)


def _bandwidth(
    ranks: int, backend: str, quick: bool
) -> tuple[tuple[tuple[str, int, float, float], ...], str]:
    """Collectives by size, and their bus bandwidth."""
    from .collective_bench import bench_collectives

    try:
        bench = bench_collectives(
            nproc=ranks,
            backend=backend,
            sizes=SIZES[:2] if quick else SIZES,
            kinds=KINDS[:1] if quick else KINDS,
            cluster=None,
        )
    except NoisyMeasurement as error:
        return (), f"no bandwidths: {error}"
    rows = bench.rows if bench is not None else ()
    return tuple((row.kind, row.nbytes, row.seconds, row.bus_bandwidth) for row in rows), ""
