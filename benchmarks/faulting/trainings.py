"""Small language models, plans by name, and one life of a training on forked ranks."""

from __future__ import annotations

import functools
import json
import os
import pydoc_data.topics
import resource
import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.plan import Plan

BATCH = 24
LENGTH = 8
ROWS = 128
WIDTH = 24
SAVE_EVERY = 3


class Language(nn.Module):
    """One layer of attention, dropout, a norm and tied weights; with experts, if wanted."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, experts) if experts else None
        if experts:
            self.experts_up = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / 5)
            self.experts_down = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / 5)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the next token."""
        x = self.embed(tokens)
        h = self.norm(x)
        q, k, v = (
            part(h).view(*h.shape[:2], 24, 1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(torch.relu(self.up(x))))
        if self.gate is not None:
            shares = self.gate(x).softmax(-1)
            inner = torch.relu(torch.einsum("bsw,ewf->ebsf", x, self.experts_up))
            x = x + torch.einsum("ebsf,efw,bse->bsw", inner, self.experts_down, shares)
        scores = self.head(x[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


EXPERTS = {"dense": 0, "experts": 24, "double": 0}
"""Models by name, with their experts; `double` is the dense one in float64."""
SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "data": {"scheme": "data"},
    "zero1": {"scheme": "zero1"},
    "zero3": {"scheme": "zero3"},
    "megatron": {"scheme": "megatron"},
    "1f1b": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
    "3d": {"stages": 2, "micro_batches": 2, "scheme": "pipeline-1f1b 2 x data 2 x megatron 2"},
    "experts split": {"pins": ("experts*",)},
    "found": {},
}
"""Options of planning by name."""


def text() -> Tensor:
    """A text that every Python has: its own documentation, byte by byte."""
    words = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor([byte for byte in words.encode() if byte < ROWS], dtype=torch.uint8)


@functools.cache
def loaded(model: str) -> LoadedModel:
    """A model, exported."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Language(EXPERTS[model])
    module = module.double() if model == "double" else module
    return load_model(
        module, ModelOptions(train=True), (torch.zeros(BATCH, LENGTH, dtype=torch.long),)
    )


@functools.cache
def plan_of(model: str, scheme: str, ranks: int) -> Plan:
    """The plan for all of the ranks."""
    options = dict(SCHEMES[scheme])
    if scheme == "experts split":
        options = {
            "mesh": (ranks,),
            "pins": tuple(f"{name}=rank:e" for name in expert_products(model)),
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_loaded(
            loaded(model), devices=ranks, cluster="local-cpu", fewer=False, **options
        ).plan


def expert_products(model: str) -> list[str]:
    """The operators that compute with the experts' weights."""
    weights = {"experts_up", "experts_down"}
    return [op.name for op in loaded(model).graph.operators if weights & set(op.inputs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The orders for a life of a training.

    `name`: of the checkpoint to begin with (None: the latest). `full_at`: the step from which the
    disk is full, on rank 0.
    """

    model: str
    scheme: str
    ranks: int
    folder: str
    steps: int
    name: str | None = None
    save_every: int = SAVE_EVERY
    wait: float | None = None
    full_at: int | None = None


def live(life: Life) -> int:
    """Train to the last step, writing each loss into the folder.

    Returns the first step of this life.
    """
    torch.manual_seed(5)
    folder = Path(life.folder)
    module = autopar.parallelize(loaded(life.model), plan_of(life.model, life.scheme, life.ranks))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    own = autopar.sampler(len(text()) // LENGTH, batch=BATCH, seed=3)
    resumed = autopar.resume(module, optimizer, folder / "saved", sampler=own, name=life.name)
    rows = text()[: len(text()) // LENGTH * LENGTH].view(-1, LENGTH).long()
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()), encoding="utf-8")

    def save(done: int) -> None:
        autopar.save(
            module, optimizer, folder / "saved", step=done, sampler=own, keep=2, wait=life.wait
        )

    first = resumed.step if resumed else 0
    for step, samples in zip(
        autopar.steps(first, life.steps, save), own.counted(own, endless=True), strict=False
    ):
        loss = float(module.train_step(rows[samples], optimizer))
        if dist.get_rank() == 0:
            with (folder / "log").open("a", encoding="utf-8") as log:
                log.write(json.dumps([step, loss, samples]) + "\n")
        if (step + 1) % life.save_every == 0 or step + 1 == life.steps:
            if life.full_at == step + 1 and dist.get_rank() == 0:
                fill_disk()
            save(step + 1)
    return first


def fill_disk() -> None:
    """Forbid this process files longer than a kilobyte, like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def curve(folder: Path) -> dict[int, tuple[float, list[int]]]:
    """Loss and samples of every step, the last word on it."""
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    return {step: (loss, samples) for step, loss, samples in map(json.loads, lines)}
