"""Plans for an expert's eye.

Well-known models on usual machines, each plan in a line with the nearest named scheme.

    benchmarks/experts.py [--quick] [--json] [--only NAME ...] [--on CLUSTER ...]

    plan         its name, micro-batches, recompute, state in host memory
    gap          step / bound - 1
    nearest      of the named schemes that fit the memory, the one whose best plan is the fastest
    difference   its excess over the plan, and the parts of it: computation, exposed communication,
                 updates, waiting of
                 stages (the rest)

Transformers come from their shapes in bfloat16 (float32 on local ranks), ResNet-50 from
transformers' configuration. Sequences are 512 tokens for BERT, 1,024 for GPT-2, 8,192 for Llama,
4,096 for Mixtral; batches are usual ones for the devices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.costmodel import Cluster, load_cluster
from autopar.errors import NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import folded_of, search_plan
from autopar.schemes import Named, scheme_named, scheme_of
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import Analysis, analyse
from benchmarks.searching.models import llama3_8b, quiet
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

BERT = Shape(
    layers=24,
    hidden=1024,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=30522,
    sequence=512,
    causal=False,
    dropout=False,
)
GPT2 = Shape(
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    ffn=3072,
    vocab=50257,
    sequence=1024,
    dropout=False,
)
LLAMA_70B = replace(llama3_8b(80), hidden=8192, heads=64, ffn=28672)
MIXTRAL = replace(llama3_8b(), vocab=32000, sequence=4096, experts=8, top_k=2, expert_ffn=14336)
VIT = Shape(
    layers=24,
    hidden=1024,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=1000,
    sequence=196,
    causal=False,
    patch=16,
    tied=False,
    dropout=False,
)
SHAPES: Mapping[str, tuple[Shape, int]] = {
    "bert-large": (BERT, 32),
    "gpt2": (GPT2, 8),
    "llama3-8b": (llama3_8b(), 1),
    "llama3-70b": (LLAMA_70B, 1),
    "mixtral-8x7b": (MIXTRAL, 2),
    "vit-large": (VIT, 64),
}
"""Shapes, with the samples of a device."""
IMAGES = 64
"""Samples of a device for ResNet-50."""
CLUSTERS: Mapping[str, tuple[str, int, str]] = {
    "8 H100": ("dgx-h100", 8, "bfloat16"),
    "2x8 H100": ("dgx-h100", 16, "bfloat16"),
    "8 RTX 4090": ("rtx4090", 8, "bfloat16"),
    "4 local ranks": ("local-cpu", 4, "float32"),
}
NAMED = ("data", "zero1", "zero3", "megatron", "megatron-sp", "expert", "pipeline-1f1b")
PRODUCTS = {16: ("data 2 (zero1) x megatron-sp 8", "pipeline-1f1b 2 x data 8 (zero1)")}
"""Further products of schemes, by devices."""
QUICK = ("bert-large", "gpt2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan and the nearest named scheme, in seconds.

    `why`: why there is no plan, or the scheme's excess by part.
    """

    model: str
    cluster: str
    plan: str = ""
    step: float | None = None
    gap: float | None = None
    nearest: str = ""
    nearest_step: float | None = None
    why: str = ""

    @property
    def difference(self) -> float | None:
        """The scheme's excess, as a share."""
        if self.step is None or self.nearest_step is None:
            return None
        return self.nearest_step / self.step - 1


def resnet50(batch: int) -> Graph:
    """The training step of ResNet-50 on images of 224 x 224, exported on the meta device."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    from autopar.frontends.torch import import_torch
    from autopar.ir import with_loss

    class Logits(torch.nn.Module):
        """The model from images to logits."""

        def __init__(self) -> None:
            super().__init__()
            config = ResNetConfig()
            config.num_labels = 1000
            self.model = ResNetForImageClassification(config)

        def forward(self, images: torch.Tensor) -> Any:
            return self.model(pixel_values=images).logits

    with quiet(), torch.device("meta"):
        model = Logits().train()
        return with_loss(import_torch(model, (torch.zeros((batch, 3, 224, 224)),)).graph)


def graphs(only: tuple[str, ...]) -> Iterator[tuple[str, Callable[[int, str], Graph]]]:
    """The models by name: their graphs for so many devices and a type."""
    for name, (shape, samples) in SHAPES.items():
        if not only or name in only:
            yield (
                name,
                lambda n, dtype, s=shape, b=samples: (
                    transformer(s, batch=max(b * n, 8), dtype=dtype).graph
                ),
            )  # type: ignore[misc]
    if not only or "resnet-50" in only:
        yield "resnet-50", lambda n, _: resnet50(IMAGES * n)


def ordinary(named: Named) -> str | None:
    """The product of stages, data and tensor parallelism nearest to a name of these."""
    words = []
    sizes = {"data": 1, "megatron-sp": 1}
    zero = 0
    for factor in named.factors:
        if factor.scheme in ("megatron", "hidden", "columns", "tensor"):
            scheme = "megatron-sp"
        else:
            scheme = factor.scheme
        if scheme.startswith("pipeline-"):
            words.append(f"{scheme} {factor.size}")
        elif scheme in sizes:
            sizes[scheme] *= factor.size
            zero = max(zero, factor.zero if scheme == "data" else 0)
        else:
            return None
    words += (
        [f"data {sizes['data']}" + (f" (zero{zero})" if zero else "")] if sizes["data"] > 1 else []
    )
    words += [f"megatron-sp {sizes['megatron-sp']}"] if sizes["megatron-sp"] > 1 else []
    return " x ".join(words) or None


def told(plan: Plan, analysis: Analysis) -> str:
    """A plan in one line."""
    schedule = plan.schedule
    words = [scheme_of(plan, analysis).name]
    if plan.unused:
        words.append(f"{plan.unused} idle")
    if schedule.micro_batches > 1:
        words.append(f"{schedule.micro_batches} micro-batches")
    if schedule.interleave > 1:
        words.append(f"{schedule.interleave} chunks")
    if schedule.recompute:
        words.append(f"recomputes {len(schedule.recompute)} segments")
    hosted = sum(parameter.state == "host" for parameter in plan.parameters.values())
    if hosted:
        words.append(f"state of {hosted} parameters in host memory")
    return ", ".join(words)


def parts_of(plan: Plan) -> dict[str, float]:
    """The parts of a step."""
    predicted = plan.predicted
    parts = {
        "computation": predicted.forward + predicted.backward,
        "communication": predicted.communication - predicted.overlapped,
    }
    parts["updates"] = predicted.update
    return {**parts, "waiting": predicted.step - sum(parts.values())}


def reason(plan: Plan, other: Plan) -> str:
    """The other plan's differences by part, as shares of the plan's step."""
    mine = parts_of(plan)
    theirs = parts_of(other)
    step = plan.predicted.step
    changes = {name: (theirs[name] - mine[name]) / step for name in mine}
    words = [
        f"{change:+.1%} {name}"
        for name, change in sorted(changes.items(), key=lambda pair: -abs(pair[1]))
        if abs(change) >= 5e-4
    ]
    memory = other.predicted.memory / plan.predicted.memory
    return ", ".join(words) + f"; {memory:.2f} of the memory"


def row(model: str, where: str, graph: Graph, cluster: Cluster) -> Row:
    """The plan of a model on a cluster, and the nearest scheme."""
    analysis = analyse(graph, train=True)
    free = Request(cluster=cluster, uniform=True)
    folded = folded_of(graph, free)
    try:
        plan = search_plan(graph, free, folded=folded)
    except NoPlanFits as error:
        return Row(model=model, cluster=where, why=str(error).partition(". ")[0])
    named = scheme_of(plan, analysis)
    own = [name for name in (named.scheme, ordinary(named)) if name]
    best: tuple[str, Plan] | None = None
    for name in dict.fromkeys((*own, *NAMED, *PRODUCTS.get(cluster.devices, ()))):
        try:
            other = search_plan(graph, pinned(free, scheme_named(name), analysis), folded=folded)
        except (NoPlanFits, UsageError):
            continue
        if best is None or other.predicted.step < best[1].predicted.step:
            best = name, other
    measured = Row(
        model=model,
        cluster=where,
        plan=told(plan, analysis),
        step=plan.predicted.step,
        gap=plan.provenance.gap,
    )
    if best is None:
        return replace(measured, why="no named scheme fits")
    return replace(
        measured, nearest=best[0], nearest_step=best[1].predicted.step, why=reason(plan, best[1])
    )


def show(measured: Row) -> None:
    """A plan in two lines."""
    if measured.step is None:
        step = ""
    else:
        step = (
            f"{1e3 * measured.step:.4g} ms, gap "
            f"{'-' if measured.gap is None else f'{measured.gap:.1%}'}: "
        )
    print(f"{measured.model:13} {measured.cluster:13} {step}{measured.plan or measured.why}")
    if measured.nearest_step is not None:
        print(f"{'':27} nearest {measured.nearest} {measured.difference:+.1%} ({measured.why})")
    sys.stdout.flush()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--only", nargs="*", default=(), help="models by name")
    parser.add_argument(
        "--on", nargs="*", default=(), choices=list(CLUSTERS), help="clusters by name"
    )
    args = parser.parse_args()
    table = []
    for where in args.on or CLUSTERS:
        preset, devices, dtype = CLUSTERS[where]
        for name, graph in graphs(tuple(args.only) or (QUICK if args.quick else ())):
            one = row(name, where, graph(devices, dtype), load_cluster(preset).sized(devices))
            table.append(one)
            if not args.json:
                show(one)
    if args.json:
        print(json.dumps({"rows": [asdict(one) | {"difference": one.difference} for one in table]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
