"""A GPT-2 of one's own on a text, with checkpoints.

`python examples/train_gpt.py book.txt`, or by torchrun on any number of ranks.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_gpt.py book.txt --folder runs/gpt
    torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint
    HOST:29500 examples/train_gpt.py book.txt

Each byte of the text is a token. Started again, with as many ranks or others, the training goes on
from its latest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import autopar

SEQUENCE = 64
BATCH = 8
VOCABULARY = 256


def build(layers: int, width: int) -> Any:
    """GPT-2 with random weights, which take their own loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_head=4,
        n_embd=width,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def decay(steps: int, step: int) -> float:
    """The share of the learning rate: up for ten steps, then down as a cosine."""
    return min((step + 1) / 10, (1 + math.cos(math.pi * min(1.0, step / steps))) / 2)


def train(given: argparse.Namespace) -> list[float]:
    """Train up to the last step; the losses of the steps that this life has made."""
    torch.manual_seed(0)
    data = autopar.tokens(given.text, SEQUENCE, type="uint8")
    example = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    run = autopar.elastic(
        build(given.layers, given.width),
        {"input_ids": example, "labels": example},
        given.folder,
        data=data,
        optimizer=lambda module: autopar.local_optimizer(torch.optim.AdamW, module, lr=3e-3),
        **({} if given.scheme is None else {"scheme": given.scheme}),
    )
    schedule = run.track(
        "schedule",
        torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: decay(given.steps, step)),
    )
    loader = DataLoader(data, batch_sampler=run.sampler)
    speaks = os.environ.get("RANK", "0") == "0"
    losses = []
    for step, tokens in run.steps(given.steps, loader, save_every=given.save_every):
        began = time.perf_counter()
        device = run.module.engine.device
        run.optimizer.zero_grad()
        loss = run.module.loss(input_ids=tokens.to(device), labels=tokens.to(device))
        loss.backward()
        run.module.clip_grad_norm_(1.0)
        run.optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if speaks:
            seconds = time.perf_counter() - began
            print(
                f"step {step + 1}: loss {losses[-1]:.4f}, {BATCH * SEQUENCE / seconds:,.0f} "
                "tokens/s",
                flush=True,
            )
            with (Path(given.folder) / "losses.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps([step, losses[-1], run.plan.devices]) + "\n")
    return losses


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text")
    parser.add_argument(
        "--folder", default="runs/gpt", help="checkpoints and plans, which all machines see"
    )
    for name, default in (("steps", 100), ("save-every", 20), ("layers", 2), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--scheme", help="a scheme known by name, such as zero3 (default: the search's plan)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
