"""The searched models.

Built-in shapes of transformers, models of a folder, and their cost graphs on a mesh.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.build import build_tables
from autopar.search import CostGraph
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.mesh import Axis, Mesh
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

CLUSTER = "dgx-h100"
MODULE = "public_models.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A name, and how to get the graph of its training step."""

    name: str
    load: Callable[[], Graph]


def llama3_8b(layers: int = 32) -> Shape:
    """Llama-3-8B, with that many layers."""
    return Shape(
        layers=layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=128256,
        sequence=8192,
        gated=True,
        bias=False,
        dropout=False,
        norm="rms_norm",
        position="rotary",
        tied=False,
    )


def gpt2(layers: int = 12) -> Shape:
    """GPT-2 of 124M parameters, with that many layers."""
    return Shape(
        layers=layers, hidden=768, heads=12, kv_heads=12, ffn=3072, vocab=50257, sequence=1024
    )


def small(layers: int = 2) -> Shape:
    """A model whose step is mostly launches, with that many layers."""
    return Shape(
        layers=layers,
        hidden=512,
        heads=8,
        kv_heads=8,
        ffn=2048,
        vocab=8192,
        sequence=256,
        dropout=False,
    )


def small_experts(layers: int = 2) -> Shape:
    """The small model with 8 experts a layer, with that many layers."""
    return replace(small(layers), experts=8, top_k=2)


def gpt3_175b(layers: int = 96) -> Shape:
    """GPT-3 175B, with that many layers."""
    return Shape(
        layers=layers, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=51200, sequence=2048
    )


def llama3_405b(layers: int = 126) -> Shape:
    """Llama-3-405B, with that many layers."""
    return replace(llama3_8b(layers), hidden=16384, heads=128, ffn=53248)


def moe_1t(layers: int = 64) -> Shape:
    """A mixture of 32 experts a layer with 1T parameters, with that many layers."""
    return replace(
        llama3_8b(layers), hidden=8192, heads=64, ffn=16384, sequence=4096, experts=32, top_k=2
    )


def mixtral_8x7b(layers: int = 32) -> Shape:
    """Mixtral 8x7B, with that many layers."""
    return replace(llama3_8b(layers), vocab=32000, sequence=4096, experts=8, top_k=2)


def qwen3_30b_a3b(layers: int = 48) -> Shape:
    """Qwen3-30B-A3B at 4,096 tokens, with that many layers."""
    return replace(
        llama3_8b(layers),
        hidden=2048,
        kv_heads=4,
        ffn=6144,
        vocab=151936,
        sequence=4096,
        head_size=128,
        experts=128,
        top_k=8,
        expert_ffn=768,
        qk_norm=True,
    )


def built_in(*, quick: bool) -> list[Model]:
    """Transformers from their shapes.

    A few layers of each, and whole models where time is no matter.
    """
    sizes = (("llama3-8b", llama3_8b, 32), ("gpt3-175b", gpt3_175b, 96))
    models = [
        Model(name=f"{name}/2 layers", load=partial(shaped, shape(2))) for name, shape, _ in sizes
    ]
    if not quick:
        models += [
            Model(name=name, load=partial(shaped, shape(layers))) for name, shape, layers in sizes
        ]
    return models


def shaped(shape: Shape, batch: int = 16) -> Graph:
    """The graph of a transformer."""
    return transformer(shape, batch=batch).graph


def llama3_70b(layers: int = 80) -> Shape:
    """Llama-3-70B, with that many layers."""
    return replace(llama3_8b(layers), hidden=8192, heads=64, ffn=28672)


def llama_configuration(layers: int = 32) -> Any:
    """Transformers' configuration of Llama-3-8B, with that many layers."""
    from transformers import LlamaConfig

    shape = llama3_8b(layers)
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.sequence,
        use_cache=False,
    )


def deepseek_configuration(layers: int = 61) -> Any:
    """Transformers' configuration of DeepSeek-V3, 671B parameters, with that many layers."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        num_hidden_layers=layers, use_cache=False, experts_implementation="grouped_mm"
    )


CONFIGURATIONS: dict[str, Callable[..., Any]] = {
    "llama3_8b": llama_configuration,
    "deepseek_v3": deepseek_configuration,
}
"""Models of transformers, by name: from a number of layers to their configuration."""


def exported(configuration: Any, batch: int) -> Graph:
    """Export a bfloat16 language model, tokens to logits, at its longest sequence.

    It lies on the meta device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from autopar.frontends.torch import import_torch
    from autopar.ir import with_loss

    class Logits(torch.nn.Module):
        """The model from token numbers to logits."""

        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_config(configuration)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.model(input_ids=tokens, use_cache=False).logits

    with torch.device("meta"):
        model = Logits().to(torch.bfloat16).eval()
        tokens = torch.zeros((batch, configuration.max_position_embeddings), dtype=torch.int64)
    return with_loss(import_torch(model, (tokens,)).graph)


def public(folder: Path, *, full: bool) -> list[Model]:
    """The PyTorch models of a folder's module (`MODELS`), and with `full` its ONNX files."""
    module = _module(folder)
    models = [Model(name=name, load=partial(_torch, module, name)) for name in module.MODELS]
    if full:
        return models + [
            Model(name=f"onnx {name}", load=partial(_onnx, module, name)) for name in module.ONNX
        ]
    return models


def full_size(folder: Path, name: str, batch: int) -> Graph:
    """A PyTorch model of a folder's module at its real size, on the meta device."""
    from autopar.frontends.load import ModelOptions, load_model

    with quiet():
        built, inputs = _module(folder).build(name, "full", "meta")
        return load_model(built, ModelOptions(batch=batch), inputs).graph


def _module(folder: Path) -> ModuleType:
    """The module of public models in a folder."""
    path = folder / MODULE
    if not path.is_file():
        raise SystemExit(f"{path} is not there; --models asks for a folder with {MODULE}")
    spec = importlib.util.spec_from_file_location("public_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _torch(module: ModuleType, name: str) -> Graph:
    from autopar.frontends.torch import import_torch
    from autopar.ir import with_loss

    with quiet():
        built, inputs = module.build(name, "small")
        return with_loss(import_torch(built, inputs).graph)


def _onnx(module: ModuleType, name: str) -> Graph:
    import onnx

    from autopar.frontends.load import ModelOptions, load_model

    with quiet(), tempfile.TemporaryDirectory() as scratch:
        proto = module.load_onnx(name)
        symbols = {
            d.dim_param
            for v in proto.graph.input
            for d in v.type.tensor_type.shape.dim
            if d.dim_param.isidentifier()
        }
        path = Path(scratch) / "model.onnx"
        onnx.save(proto, str(path))
        return load_model(
            str(path),
            ModelOptions(dims={symbol: 8 if "batch" in symbol else 1024 for symbol in symbols}),
        ).graph


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and words of other libraries."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def analysed(graph: Graph) -> Analysis:
    """The analysis of a training step."""
    return analyse(graph, train=True)


def folded(graph: Graph) -> tuple[Analysis, Multiplicities]:
    """Analyse the graph with equal layers folded, and count its operators, as the planner does."""
    folded = FoldedModel(graph, train=True)
    return folded.analysis(short=True), Multiplicities(counts=folded.counts)


def cost_graph(
    analysis: Analysis, sizes: tuple[int, ...], work: Multiplicities | None = None
) -> CostGraph:
    """The priced tables on a mesh of these sizes.

    `UsageError` where it cannot be laid over the cluster.
    """
    cluster = load_cluster(CLUSTER).sized(math.prod(sizes))
    levels = bind_axes(cluster, sizes)
    if levels is None:
        raise UsageError(f"the mesh {sizes} cannot be laid over {CLUSTER}")
    axes = tuple(
        Axis(name=f"axis{i}", size=size, level=level)
        for i, (size, level) in enumerate(zip(sizes, levels, strict=True))
    )
    return build_tables(
        analysis,
        MeshPrices(cluster=cluster, mesh=Mesh(axes=axes)),
        optimizer="adamw",
        work=work or Multiplicities(),
    ).graph


def in_a_row(graph: CostGraph, count: int) -> CostGraph:
    """Copies of a graph, its last variable joined to the next one's first: as many equal layers.

    The joint costs a microsecond wherever the first digits of two choices differ.
    """
    if count == 1:
        return graph
    assert graph.digits is not None
    size = len(graph.sizes)
    last = graph.digits[-1][:, 0]
    first = graph.digits[0][:, 0]
    joint = 1e-6 * (last[:, None] != first)
    edges = {
        (u + size * copy, v + size * copy): table
        for copy in range(count)
        for (u, v), table in graph.edges.items()
    }
    edges |= {(size * copy - 1, size * copy): joint for copy in range(1, count)}
    return CostGraph(
        sizes=graph.sizes * count,
        unary=graph.unary * count,
        edges=edges,
        memory=None if graph.memory is None else graph.memory * count,
        digits=graph.digits * count,
    )
