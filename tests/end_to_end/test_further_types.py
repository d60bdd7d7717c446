"""Types of further families, planned with ZeRO 3, compute on two ranks what one device does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.frontends.load import ModelOptions
from autopar.runtime.run import run_plan
from tests.end_to_end.small_types import small_configuration

pytest.importorskip("transformers")

FURTHER: Mapping[str, Mapping[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "exaone4": {},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {},
    "modernbert": {},
    "olmoe": {},
    "seed_oss": {},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
    },
}
"""Types, and the keys in which they differ from the small sizes."""


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", FURTHER)
def test_one_device_is_equalled(tmp_path: Path, kind: str) -> None:
    keys = {**small_configuration(kind), **FURTHER[kind]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    options = ModelOptions(batch=4, dtype="float32", dims={"sequence": 16})
    model = load_any(f"hf:{tmp_path}", options)
    assert model.build is not None
    built = {name: tuple(value.shape) for name, value in model.build().named_parameters()}
    assert {tensor.name: tensor.shape for tensor in model.graph.parameters} == built
    plan = plan_loaded(
        model, devices=2, cluster="local-cpu", mesh=(2,), scheme="zero3", optimizer="sgd"
    ).plan
    report = run_plan(model, plan, check=True)
    assert report.ok, report.check


@pytest.mark.slow
@pytest.mark.gloo
def test_parameters_without_elements_and_arguments_named_by_python(tmp_path: Path) -> None:
    """DINOv3 has no registers by default, and draws `uniform_(from=..., to=...)`."""
    keys = {**small_configuration("dinov3_vit"), "image_size": 32, "patch_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = load_any(f"hf:{tmp_path}", ModelOptions(batch=4, dtype="float32"))
    assert any(0 in tensor.shape for tensor in model.graph.parameters)
    plan = plan_loaded(
        model, devices=2, cluster="local-cpu", mesh=(2,), scheme="zero3", optimizer="sgd"
    ).plan
    report = run_plan(model, plan, check=True)
    assert report.ok, report.check
