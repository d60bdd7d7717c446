"""A Llama whose weights stay, with low-rank matrices that learn (LoRA).

By torchrun or on one device.

    torchrun --nproc-per-node 2 examples/finetune_llama.py book.txt --model FOLDER

FOLDER holds a Llama as Hugging Face saves it; without it a small one with random weights is made.
Each projection computes x W' + x A' B': W is frozen, so that it has no gradient and no state of an
optimizer, and the plan counts none. What was learnt is written alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar

RANK = 4
SCALE = 2.0
SEQUENCE = 32
BATCH = 4
ADAPTED = ("q_proj", "v_proj")


class Adapted(nn.Module):
    """A frozen product, and two thin matrices beside it.

    The second begins with zeros, so nothing changes at first.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """The product with its correction."""
        corrected: Tensor = self.base(x) + SCALE * (x @ self.down.T) @ self.up.T
        return corrected


def adapt(model: nn.Module) -> nn.Module:
    """Freeze everything, and give the projections of attention what they learn by."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name in ADAPTED:
            if isinstance(base := getattr(module, name, None), nn.Linear):
                setattr(module, name, Adapted(base))
    return model


def small() -> Any:
    """A Llama of two layers, over bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def load(folder: str | None) -> Any:
    """The model of a folder, or the small one."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    if folder is None:
        model = small()
    else:
        model = LlamaForCausalLM.from_pretrained(folder, local_files_only=True)
    model.config.use_cache = False
    return model


def train(given: argparse.Namespace) -> list[float]:
    """Train the added matrices; the losses."""
    model = adapt(load(given.model))
    data = autopar.tokens(given.text, SEQUENCE, type="uint8")
    example = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        own = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return autopar.local_optimizer(torch.optim.AdamW, own, lr=1e-2)

    run = autopar.elastic(
        model,
        {"input_ids": example, "labels": example},
        given.folder,
        data=data,
        optimizer=optimizer,
    )
    losses = []
    for _, tokens in run.steps(
        given.steps, DataLoader(data, batch_sampler=run.sampler), save_every=given.steps
    ):
        losses.append(
            float(run.module.train_step({"input_ids": tokens, "labels": tokens}, run.optimizer))
        )
    write_learnt(run.module, Path(given.folder) / "adapters.safetensors")
    return losses


def write_learnt(module: Any, path: Path) -> None:
    """Save the fine-tuned weights, whole, in one file."""
    from safetensors.torch import save_file

    learnt = {
        name: value for name, value in module.graph_parameters().items() if value.requires_grad
    }
    whole = module.full_values(learnt)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        save_file({name: value.detach().cpu().contiguous() for name, value in whole.items()}, path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text")
    parser.add_argument(
        "--model", help="a folder of Hugging Face (default: a small Llama with random weights)"
    )
    parser.add_argument("--folder", default="runs/llama", help="checkpoints and plans")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for number, loss in enumerate(train(parse())):
        print(f"step {number + 1}: loss {loss:.4f}")
