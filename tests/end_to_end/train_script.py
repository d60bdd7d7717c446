"""An ordinary training script.

`torchrun --nproc-per-node 2 train_script.py FOLDER PLAN PLAN PLAN`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 48
WIDTH = 32
BATCH = 8
LENGTH = 8


@dataclass
class Output:
    """The result of the model, as transformers' model outputs are."""

    logits: Tensor
    hidden: Tensor | None = None
    kind: str = "lm"


torch.export.register_dataclass(Output)


class Block(nn.Module):
    """Attention and feed-forward, each beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        q, k, v = (
            t.view(*t.shape[:2], 4, -1).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x = x + self.out(attended)
        output: Tensor = x + self.down(F.gelu(self.up(x)))
        return output


class Model(nn.Module):
    """A small language model with tied embeddings, and a buffer that stands in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, input_ids: Tensor, output_hidden: bool = False) -> Output:
        """Scores of the next token."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return Output(logits=self.head(x) * self.scale, hidden=x if output_hidden else None)


def build(seed: int = 0) -> Model:
    """The model in float64."""
    torch.manual_seed(seed)
    return Model().double()


def batch(step: int) -> Tensor:
    """The data of a step: every rank has all of it."""
    return torch.randint(
        0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses and gradient norms of the steps."""
    seen = []
    for step in steps:
        tokens = batch(step)
        logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]
    return seen


LEGS = (range(0, 2), range(2, 4), range(4, 6))
"""The steps between two checkpoints."""


def on_one_device() -> list[float]:
    """All steps without a plan."""
    model = build()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(LEGS[-1].stop))


def main(folder: str, *plans: str) -> None:
    """One leg under each plan; each begins with the checkpoint that the one before it has left."""
    checkpoint: Any = import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import autopar

    keys = set(build().state_dict())
    seen: list[float] = []
    same = True
    for number, (plan, steps) in enumerate(zip(plans, LEGS, strict=True)):
        model = autopar.parallelize(build(seed=number), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        same = same and set(model.state_dict()) == keys
        if number:
            weights, state = get_state_dict(model, optimizer)
            checkpoint.load(
                {"model": weights, "optimizer": state}, checkpoint_id=Path(folder, str(number - 1))
            )
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        seen += train(model, optimizer, steps)
        weights, state = get_state_dict(model, optimizer)
        checkpoint.save(
            {"model": weights, "optimizer": state}, checkpoint_id=Path(folder, str(number))
        )
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(
        json.dumps({"seen": seen, "same_keys": same}), encoding="utf-8"
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
