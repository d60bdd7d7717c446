"""Predicted peaks of memory beside those of torch's tracker, for training steps of four models.

Each model is tracked unchanged on one device (with and without recompute of its blocks), and as the
lowered program of one rank of four under several plans. All runs use fake tensors: `python
benchmarks/memory.py [--models gpt2 resnet50] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.memory.autograd_liveness import Autograd
from autopar.costmodel.memory.peak import Memory, autograd_memory, predicted_memory
from autopar.costmodel.memory.recompute import Recompute
from autopar.costmodel.memory.states import Training
from autopar.frontends.torch import import_torch
from autopar.ir import Graph
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.space.candidates import name_axes
from autopar.schemes import AXIS_SCHEMES
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.program import Program
from benchmarks.tracked_memory import Tracked, fake_world, track_module, track_program

MIB = 2.0**20
WITHOUT_LIMIT = 1e18
PLANS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("data", (4,)),
    ("zero3", (4,)),
    ("megatron", (4,)),
    ("megatron-sp", (4,)),
    ("found", (4,)),
    ("found", (2, 2)),
)
"""Plans of one rank of four: a scheme, or the one found, and the sizes of the mesh."""


class Loss(nn.Module):
    """A transformers model that returns nothing but its loss."""

    def __init__(self, model: nn.Module, first: str, **fixed: Any) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.fixed = fixed

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of inputs and labels."""
        loss: Tensor = self.model(**{self.first: x, "labels": labels}, **self.fixed).loss
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Makers of a module and its inputs, and the path of the lists of its blocks."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    blocks: str

    def parts(self, module: nn.Module) -> Iterable[nn.Module]:
        """The blocks that are recomputed one by one."""
        blocks = module.get_submodule(self.blocks)
        assert isinstance(blocks, nn.ModuleList)
        return [layer for block in blocks for layer in (getattr(block, "layers", None) or [block])]


def _tokens(batch: int, sequence: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (
        torch.zeros(batch, sequence, dtype=torch.long),
        torch.zeros(batch, sequence, dtype=torch.long),
    )


def _transformers() -> Any:
    return import_module("transformers")


def gpt2(
    *,
    batch: int = 8,
    sequence: int = 512,
    layers: int = 4,
    vocab: int = 50257,
    attention: str = "sdpa",
) -> Model:
    """GPT-2 small in width, with dropout."""

    def make() -> nn.Module:
        config = _transformers().GPT2Config(
            n_layer=layers,
            vocab_size=vocab,
            n_positions=1024,
            attn_implementation=attention,
            attn_pdrop=0.1 if attention == "eager" else 0.0,
        )
        return Loss(_transformers().GPT2LMHeadModel(config), "input_ids", use_cache=False)

    return Model(make=make, inputs=_tokens(batch, sequence), blocks="model.transformer.h")


def llama(*, batch: int = 4, sequence: int = 512, layers: int = 4, vocab: int = 32000) -> Model:
    """Llama: grouped queries, RMS norms, rotary positions, SwiGLU."""

    def make() -> nn.Module:
        config = _transformers().LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=vocab,
            max_position_embeddings=sequence,
            attn_implementation="sdpa",
        )
        return Loss(_transformers().LlamaForCausalLM(config), "input_ids", use_cache=False)

    return Model(make=make, inputs=_tokens(batch, sequence), blocks="model.model.layers")


def bert(
    *,
    batch: int = 16,
    sequence: int = 256,
    layers: int = 4,
    vocab: int = 30522,
    attention: str = "sdpa",
) -> Model:
    """BERT base in width, with dropout."""

    def make() -> nn.Module:
        config = _transformers().BertConfig(
            num_hidden_layers=layers,
            vocab_size=vocab,
            attn_implementation=attention,
            attention_probs_dropout_prob=0.1 if attention == "eager" else 0.0,
        )
        return Loss(_transformers().BertForMaskedLM(config), "input_ids")

    return Model(make=make, inputs=_tokens(batch, sequence), blocks="model.bert.encoder.layer")


def resnet50(*, batch: int = 16, size: int = 224, depths: tuple[int, ...] = (3, 4, 6, 3)) -> Model:
    """ResNet-50 on pictures."""

    def make() -> nn.Module:
        config = _transformers().ResNetConfig(num_labels=1000, depths=list(depths))
        return Loss(_transformers().ResNetForImageClassification(config), "pixel_values")

    def inputs() -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)

    return Model(make=make, inputs=inputs, blocks="model.resnet.encoder.stages")


MODELS: Mapping[str, tuple[Callable[[], Model], ...]] = {
    "gpt2": (
        gpt2,
        lambda: gpt2(batch=4, sequence=64),
        lambda: gpt2(batch=4, sequence=1024, vocab=1024),
        lambda: gpt2(batch=4, layers=2, vocab=1024, attention="eager"),
    ),
    "llama": (llama, lambda: llama(sequence=64), lambda: llama(sequence=2048, vocab=1024)),
    "bert": (
        bert,
        lambda: bert(batch=4, sequence=64),
        lambda: bert(layers=2, vocab=512, attention="eager"),
    ),
    "resnet50": (resnet50, lambda: resnet50(batch=4, size=64)),
}
"""Sizes in which the loss, the weights or the layers make the peak."""


def graph_of(model: Model) -> tuple[Graph, nn.Module]:
    """The training graph, and the module on meta weights that it was read from."""
    with torch.device("meta"):
        module = model.make().train()
    graph = import_torch(module, model.inputs()).graph
    return replace(graph, loss=graph.outputs[-1]), module


def segments(graph: Graph, module: nn.Module, model: Model) -> Recompute:
    """The operators of every block, by the names that they have from their modules."""
    names = {part: name for name, part in module.named_modules()}
    starts = [names[part] for part in model.parts(module)]
    groups = [
        tuple(op.name for op in graph.operators if op.name.startswith((f"{start}.", f"{start}/")))
        for start in starts
    ]
    return Recompute(segments=tuple(groups))


def planned(analysis: Analysis, scheme: str, sizes: tuple[int, ...]) -> Program:
    """The program of a scheme (or of the plan found) on a mesh."""
    cluster = load_cluster("dgx-h100").sized(math.prod(sizes))
    levels = bind_axes(cluster, sizes)
    assert levels is not None
    wanted = Request(
        cluster=cluster,
        train=True,
        optimizer="adamw",
        mesh=name_axes(cluster, sizes, levels),
        memory=WITHOUT_LIMIT,
    )
    if scheme in AXIS_SCHEMES:
        wanted = replace(wanted, limits=AXIS_SCHEMES[scheme])
    return search_plan(analysis.graph, wanted).program(analysis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison, in bytes."""

    model: str
    case: str
    predicted: float
    tracked: float
    saved: float
    tracked_saved: float

    @property
    def error(self) -> float:
        """Relative error of the predicted peak."""
        return self.predicted / self.tracked - 1


def row(name: str, case: str, memory: Memory, tracked: Tracked) -> Row:
    """A prediction and the tracked memory."""
    return Row(
        model=name,
        case=case,
        predicted=memory.total,
        tracked=float(tracked.peak),
        saved=memory.saved,
        tracked_saved=float(tracked.saved),
    )


def compare(
    name: str, model: Model, *, plans: Iterable[tuple[str, tuple[int, ...]]] = PLANS
) -> Iterator[Row]:
    """Every case of one model."""
    graph, module = graph_of(model)
    analysis = analyse(graph, train=True)
    alone = planned(analysis, "found", (1,))
    again = segments(graph, module, model)
    adamw = Training(optimizer="adamw")
    memory = autograd_memory(alone, analysis, adamw, composite=True)
    yield row(name, "one device", memory, track_module(model.make, model.inputs))
    memory = autograd_memory(alone, analysis, adamw, Autograd(recompute=again), composite=True)
    yield row(
        name,
        "one device, recompute",
        memory,
        track_module(model.make, model.inputs, recompute=model.parts),
    )
    with fake_world(4):
        for scheme, sizes in plans:
            program = planned(analysis, scheme, sizes)
            memory = predicted_memory(program, analysis, optimizer="adamw", composite=True)
            yield row(
                name, f"{scheme} on {'x'.join(map(str, sizes))}", memory, track_program(program)
            )


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{'model':<12}{'case':<24}{'predicted':>12}{'tracked':>12}{'error':>9}"
        f"{'saved':>11}{'tracked':>11}   (MiB)"
    )
    rows = []
    for name in options.models:
        for number, make in enumerate(MODELS[name]):
            for row in compare(f"{name}-{number}", make()):
                rows.append(row)
                sizes = f"{row.predicted / MIB:>12.1f}{row.tracked / MIB:>12.1f}{row.error:>+9.2%}"
                saved = f"{row.saved / MIB:>11.1f}{row.tracked_saved / MIB:>11.1f}"
                print(f"{row.model:<12}{row.case:<24}{sizes}{saved}", flush=True)
    worst = max(rows, key=lambda row: abs(row.error))
    mean = sum(abs(row.error) for row in rows) / len(rows)
    print(
        f"{len(rows)} cases: mean error {mean:.2%}, largest {worst.error:+.2%} ({worst.model}, "
        f"{worst.case})"
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
