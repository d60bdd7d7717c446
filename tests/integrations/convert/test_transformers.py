"""A plan of styles loaded by transformers itself, on two and four ranks: the logits and gradients
of one device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from convert_models import styles_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.integrations.convert import convert
from autopar.runtime.launch import run_ranks

pytest.importorskip(
    "accelerate", reason="transformers loads no distributed model without accelerate"
)
transformers = pytest.importorskip("transformers")
configuration = pytest.importorskip("transformers.distributed.configuration_utils")
TOKENS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(2))


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation="sdpa",
        **more,
    )
    return transformers.LlamaForCausalLM(config).float()


class Logits(nn.Module):
    """The model from tokens to logits, its parameters under their own names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner.model
        self.lm_head = inner.lm_head

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.lm_head(
            self.model(input_ids=tokens, use_cache=False).last_hidden_state
        )
        return output


def _loss(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


def _loaded(folder: str, styles: dict[str, str]) -> tuple[float, list[str], int]:
    """The largest difference on this rank of logits and gradients, and how many parameters are
    split.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    whole = llama()
    asked = configuration.DistributedConfig(tp_plan=styles, tp_size=ranks)
    sharded = transformers.LlamaForCausalLM.from_pretrained(
        folder, distributed_config=asked, dtype=torch.float32
    )
    logits, right = (model(input_ids=TOKENS, use_cache=False).logits for model in (sharded, whole))
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    worst = float((logits - right).abs().max())
    for value in (logits, right):
        _loss(value).backward()
    wrong = []
    split = 0
    gradients = dict(sharded.named_parameters())
    for name, parameter in whole.named_parameters():
        held = gradients[name].grad
        split += isinstance(held, DTensor) and any(
            not p.is_replicate() for p in gradients[name].placements
        )
        full = held.full_tensor() if isinstance(held, DTensor) else held
        if float((full - parameter.grad).abs().max()) > 1e-5:
            wrong.append(name)
    return worst, wrong, split


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, 4])
def test_transformers_runs_the_styles(ranks: int, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    given: dict[str, Any] = {
        "stages": 1,
        "recompute": "none",
        "zero": 0,
        "micro_batches": 1,
        "scheme": "megatron",
    }
    plan = autopar.plan(Logits(model), (TOKENS,), devices=ranks, cluster="dgx-h100", **given)
    styles = styles_of(convert(plan, "transformers").text)
    assert styles["model.layers.*.self_attn.q_proj"] == "colwise" and styles[
        "model.layers.*.mlp.down_proj"
    ].startswith("rowwise")
    for worst, wrong, split in run_ranks(_loaded, ranks, str(tmp_path), styles):
        assert worst < 1e-5 and wrong == []
        assert split >= 14
