"""DeepSeek-V4: hyper-connections, compressed attention and an indexer, in double precision.

Its code computes some of it in single precision, whose rounding is all that a weight is made of
which begins at zero (`hc_head.hc_base`); here that code is given doubles.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.run import run_plan
from tests.end_to_end.small_types import small_configuration
from tests.end_to_end.test_configured_types import PLANS

pytest.importorskip("transformers")

CODE = "transformers.models.deepseek_v4.modeling_deepseek_v4"
# Shorter than the sequence, so that there is something to compress.
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


class _Doubles:
    """Torch, in which single precision is double."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_one_device_is_equalled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(
        **small_configuration("deepseek_v4") | {"compress_rates": RATES}
    )
    monkeypatch.setattr(importlib.import_module(CODE), "torch", _Doubles())
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float64,
            # Grouped products have no doubles.
            experts_implementation="batched_mm",
        )
        tokens = torch.randint(3, 98, (8, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    model = load_model(module.train(), ModelOptions(), example_inputs=inputs)
    devices, scheme = PLANS[name]
    plan = plan_loaded(
        model, devices=devices, cluster="local-cpu", scheme=scheme, optimizer="sgd"
    ).plan
    report = run_plan(model, plan, check=True)
    assert report.ok, report.check
