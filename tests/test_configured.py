"""Models that are a configuration alone: planned, planned with another batch, and refused where
weights are needed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.cli import run
from autopar.errors import UsageError
from autopar.plan_origin import model_of_batch, model_of_plan

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}


@pytest.fixture(name="model")
def model_of_configuration(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"hf:{tmp_path / 'config.json'}"


def test_a_plan_of_a_configuration_is_not_run(model: str, tmp_path: Path) -> None:
    plan = autopar.plan(model, devices=2, cluster="dgx-h100", batch=4, dims={"sequence": 16})
    plan.save(tmp_path / "plan.json")
    with pytest.raises(
        UsageError,
        match=(
            "is a configuration: its plan can be priced and read, not run; plan and run the model "
            "itself"
        ),
    ):
        run(["run", str(tmp_path / "plan.json"), "--model", model])


def test_another_batch_keeps_the_sequence_of_the_plan(model: str) -> None:
    plan = autopar.plan(model, devices=2, cluster="dgx-h100", batch=4, dims={"sequence": 16})
    shapes = [
        imported.graph.tensors["tokens"].shape
        for imported in (model_of_plan(model, plan), model_of_batch(model, plan, 8))
    ]
    assert shapes == [(4, 16), (8, 16)]
