"""Models of all families at their real widths, cut to few layers so that many searches take little.

Real widths make searches decide as they do for whole models; equal layers are folded, so few of
them are enough. A case with a share has that share of the memory that its fastest plan takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel import load_cluster
from autopar.ir import Graph
from autopar.planning.model.request import WITHOUT_LIMIT, Request
from autopar.planning.planner import search_plan
from benchmarks.searching import models
from benchmarks.validating.known.shape import Latent, Shape, StateSpace
from benchmarks.validating.known.transformer import transformer

BERT = Shape(
    layers=2,
    hidden=1024,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=30522,
    sequence=512,
    causal=False,
    dropout=False,
)
VIT = replace(BERT, vocab=1000, sequence=196, patch=16, tied=False)
LLAMA_8B = replace(models.llama3_8b(2), sequence=4096)
LLAMA_70B = replace(models.llama3_70b(2), sequence=4096)
MIXTRAL = models.mixtral_8x7b(2)
QWEN = models.qwen3_30b_a3b(2)
SHAPES: Mapping[str, Shape] = {
    "bert": BERT,
    "vit": VIT,
    "gpt2": replace(models.gpt2(2), dropout=False),
    "gpt3": models.gpt3_175b(2),
    "llama-8b": LLAMA_8B,
    "llama-8b-8": replace(LLAMA_8B, layers=8),
    "llama-70b": LLAMA_70B,
    "mixtral": MIXTRAL,
    "mixtral-4": replace(MIXTRAL, layers=4),
    "qwen3-moe": QWEN,
    "gpt-oss": replace(
        QWEN,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_size=64,
        vocab=201088,
        experts=32,
        top_k=4,
        expert_ffn=2880,
        window=128,
        full_every=2,
        qk_norm=False,
    ),
    "deepseek": replace(
        QWEN,
        hidden=2048,
        heads=16,
        kv_heads=16,
        head_size=0,
        ffn=10944,
        vocab=102400,
        latent=Latent(kv_rank=512, rope=64, nope=128, value=128),
        experts=64,
        top_k=6,
        expert_ffn=1408,
        shared_ffn=2816,
        dense_layers=1,
        qk_norm=False,
    ),
    "t5": replace(BERT, vocab=32128, causal=True, encoder_layers=2),
    "mamba": replace(
        LLAMA_8B,
        hidden=2560,
        heads=32,
        kv_heads=32,
        ffn=1,
        vocab=50280,
        sequence=2048,
        position="none",
        pattern="MM",
        state=StateSpace(heads=80, width=64, size=128),
    ),
    "hybrid": replace(
        MIXTRAL,
        hidden=4096,
        vocab=131072,
        position="none",
        layers=4,
        pattern="ME*-",
        state=StateSpace(heads=128, width=64, size=128, groups=8),
    ),
}
"""The models by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its batch and devices; `share`: of the memory that its fastest plan takes."""

    model: str
    batch: int
    devices: int
    cluster: str = "dgx-h100"
    share: float | None = None

    @property
    def name(self) -> str:
        """The model with its devices, and whether memory binds."""
        tight = "-tight" if self.share else ""
        return f"{self.model}-{self.devices}{tight}"

    @property
    def graph(self) -> Graph:
        """The training step."""
        return transformer(SHAPES[self.model], batch=self.batch).graph

    def request(self, graph: Graph) -> Request:
        """The request, of a cluster's memory or a share of what the fastest plan takes."""
        request = Request(cluster=load_cluster(self.cluster).sized(self.devices))
        if self.share is None:
            return request
        free = search_plan(graph, replace(request, memory=WITHOUT_LIMIT))
        return replace(request, memory=self.share * free.predicted.memory)


CASES = (
    Case(model="llama-8b", batch=4, devices=4),
    Case(model="llama-8b", batch=16, devices=8),
    Case(model="llama-8b", batch=24, devices=4, share=0.5),
    Case(model="llama-8b-8", batch=16, devices=8, cluster="dgx-a100"),
    Case(model="llama-8b", batch=16, devices=16),
    Case(model="llama-70b", batch=8, devices=8, share=0.8),
    Case(model="gpt3", batch=16, devices=16, cluster="dgx-a100-80g"),
    Case(model="gpt2", batch=64, devices=8),
    Case(model="gpt2", batch=36, devices=12),
    Case(model="gpt2", batch=64, devices=8, cluster="l40s", share=0.6),
    Case(model="bert", batch=128, devices=8),
    Case(model="vit", batch=256, devices=8, cluster="rtx4090"),
    Case(model="t5", batch=64, devices=8),
    Case(model="mamba", batch=16, devices=8),
    Case(model="hybrid", batch=8, devices=4),
    Case(model="mixtral", batch=8, devices=4, share=0.7),
    Case(model="mixtral-4", batch=16, devices=8),
    Case(model="qwen3-moe", batch=8, devices=8),
    Case(model="gpt-oss", batch=16, devices=4),
    Case(model="deepseek", batch=8, devices=8),
)
"""20 cases, dense and of experts, memory free and binding."""
CASES_BY_NAME = {case.name: case for case in CASES}
