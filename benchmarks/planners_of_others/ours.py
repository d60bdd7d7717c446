"""Our plan of the model that a rival plans, in a process of its own: NAME CHECKOUT.

Writes `STEP` and the predicted seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planners_of_others.programs.llama_of_autoparallel import LLAMA
from benchmarks.searching.models import llama3_8b
from benchmarks.validating.known.shape import Latent, Shape

GIB = 2**30


def llama3_70b() -> Shape:
    """Llama-3-70B."""
    return replace(llama3_8b(80), hidden=8192, heads=64, ffn=28672)


def deepseek_v3() -> Shape:
    """DeepSeek-V3 with 64 layers, as hyper-parallel's example has it."""
    return replace(
        llama3_8b(64),
        hidden=7168,
        heads=128,
        kv_heads=128,
        ffn=18432,
        vocab=129280,
        sequence=4096,
        latent=Latent(kv_rank=512, rope=64, nope=128, value=128, q_rank=1536),
        experts=256,
        top_k=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
    )


def small_deepseek() -> Shape:
    """autoparallel's small DeepSeek-V3 with 64 experts a layer."""
    return replace(
        llama3_8b(6),
        hidden=256,
        heads=16,
        kv_heads=16,
        ffn=1024,
        vocab=2048,
        sequence=2048,
        latent=Latent(kv_rank=512, rope=64, nope=128, value=128),
        experts=64,
        top_k=3,
        expert_ffn=256,
        shared_ffn=512,
        dense_layers=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a preset with a global batch.

    `shape`: its sizes, or None for autoparallel's own Llama of `layers` layers. `mesh`: sizes of
    the axes, on which one stage runs the whole batch at once, as the rival has it (None: all is
    open). `memory`: bytes of a device, where a rival is told them.
    """

    cluster: str
    devices: int
    batch: int
    shape: Callable[[], Shape] | None = None
    layers: int = 0
    mesh: tuple[int, ...] | None = None
    memory: float | None = None


CASES: Mapping[str, Case] = {
    "simumax-8b": Case(
        shape=lambda: replace(llama3_8b(), sequence=4096), cluster="dgx-b200", devices=8, batch=64
    ),
    "simumax-70b": Case(
        shape=lambda: replace(llama3_70b(), sequence=4096),
        cluster="dgx-b200",
        devices=64,
        batch=256,
    ),
    "galvatron-7b": Case(
        shape=lambda: replace(llama3_8b(), kv_heads=32, ffn=11008, vocab=32000, sequence=2048),
        cluster="dgx-a100",
        devices=8,
        batch=64,
        memory=38 * GIB,
    ),
    "hyper-deepseek": Case(shape=deepseek_v3, cluster="dgx-h100", devices=512, batch=3840),
    "llama-4": Case(layers=4, cluster="dgx-h100", devices=8, batch=4, mesh=(2, 4)),
    "llama-32": Case(layers=32, cluster="dgx-h100", devices=64, batch=16, mesh=(8, 8)),
    "deepseek-6": Case(
        shape=small_deepseek, cluster="dgx-h100", devices=256, batch=2048, mesh=(4, 64)
    ),
}


def step(case: Case, checkout: Path) -> float:
    """Seconds of a step of our plan."""
    return of_module(case, checkout) if case.shape is None else of_shape(case, case.shape())


def of_shape(case: Case, shape: Shape) -> float:
    """The plan of a model made from its sizes."""
    from autopar.costmodel import load_cluster
    from autopar.planning.model.request import Request
    from autopar.planning.planner import search_plan
    from autopar.schemes.pinning import stage_mesh
    from benchmarks.validating.known.transformer import transformer

    cluster = load_cluster(case.cluster).sized(case.devices)
    request = Request(cluster=cluster, memory=case.memory)
    if case.mesh is not None:
        request = replace(
            request, mesh=stage_mesh(cluster, list(case.mesh), 1), stages=1, micro_batches=1
        )
    graph = transformer(shape, batch=case.batch, dtype="bfloat16").graph
    return search_plan(graph, request).predicted.step


def of_module(case: Case, checkout: Path) -> float:
    """The plan of the very module that autoparallel's example has, read from its file."""
    import torch

    import autopar

    file = checkout / "autoparallel" / "_testing" / "models" / "llama3.py"
    spec = importlib.util.spec_from_file_location("llama_of_autoparallel", file)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = theirs
    spec.loader.exec_module(theirs)
    arguments = theirs.TransformerModelArgs(n_layers=case.layers, **LLAMA)
    with torch.device("meta"):
        model = theirs.Transformer(arguments).to(torch.bfloat16)
        tokens = torch.empty((case.batch, 8192), dtype=torch.int64)
    return autopar.plan(
        model,
        (tokens,),
        cluster=case.cluster,
        devices=case.devices,
        mesh=case.mesh,
        stages=1,
        micro_batches=1,
    ).predicted.step


if __name__ == "__main__":
    print("STEP", step(CASES[sys.argv[1]], Path(sys.argv[2])))
