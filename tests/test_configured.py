"""Models that are a configuration alone: planned, run with the weights beside them, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import run
from autopar.configured import load_any
from autopar.errors import ModelError, UsageError
from autopar.frontends.load import ModelOptions
from autopar.plan_origin import model_of_batch, model_of_plan

pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
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


def written(folder: Path, **more: Any) -> str:
    """A configuration file in `folder`, as a MODEL."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return f"hf:{folder / 'config.json'}"


@pytest.fixture(name="model")
def model_of_configuration(tmp_path: Path) -> str:
    return written(tmp_path)


@pytest.mark.parametrize("stored", [False, True], ids=["random", "safetensors"])
def test_a_plan_of_a_configuration_runs(model: str, tmp_path: Path, stored: bool) -> None:
    if stored:
        from transformers import AutoModelForCausalLM, LlamaConfig

        causal: Any = AutoModelForCausalLM
        causal.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    path = str(tmp_path / "plan.json")
    run(
        f"plan {model} --devices 2 --cluster local-cpu --batch 4 --seq 16 --dtype float32 "
        f"--scheme megatron --no-compare -o {path}".split()
    )
    assert run(["run", path, "--model", model, "--check"]) == 0


def test_names_are_those_of_the_module(model: str) -> None:
    loaded = load_any(model, ModelOptions(batch=2))
    names = {tensor.name for tensor in loaded.graph.parameters}
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert any(op.name.startswith("model.layers.1.self_attn/") for op in loaded.graph.operators)


def test_the_loss_is_the_models_own(model: str) -> None:
    loaded = load_any(model, ModelOptions(batch=2))
    assert loaded.graph.loss in loaded.graph.outputs
    assert {op.kind for op in loaded.graph.operators} >= {"autopar.linear_cross_entropy.default"}


def test_inference_has_no_labels(model: str) -> None:
    loaded = load_any(model, ModelOptions(batch=2, train=False))
    assert loaded.graph.inputs == ("input_ids",)
    assert loaded.graph.loss is None


def test_another_batch_keeps_the_sequence_of_the_plan(model: str) -> None:
    plan = autopar.plan(model, devices=2, cluster="dgx-h100", batch=4, dims={"sequence": 16})
    shapes = [
        imported.graph.tensors["input_ids"].shape
        for imported in (model_of_plan(model, plan), model_of_batch(model, plan, 8))
    ]
    assert shapes == [(4, 16), (8, 16)]


def test_the_sequence_is_as_long_as_positions_allow(model: str) -> None:
    loaded = load_any(model, ModelOptions(batch=2))
    assert loaded.graph.tensors["input_ids"].shape == (2, 32)
    parameters = sum(tensor.size for tensor in loaded.graph.parameters)
    assert loaded.notes[0] == (
        f"LlamaForCausalLM: {parameters / 1e3:.1f} thousand parameters; a batch is "
        "input_ids 2 x 32 (--batch, --seq)"
    )


def test_an_unknown_type_is_what_its_architectures_name(tmp_path: Path) -> None:
    loaded = load_any(written(tmp_path, model_type="its_own"), ModelOptions())
    assert loaded.graph.name == "LlamaForCausalLM"
    assert "transformers has no type its_own: it is built as LlamaForCausalLM" in loaded.notes[1]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    more = {
        "quantization_config": {"quant_method": "fp8"},
        "auto_map": {"AutoModel": "modeling_llama.Mine"},
        "num_nextn_predict_layers": 1,
    }
    notes = " ".join(load_any(written(tmp_path, **more), ModelOptions()).notes)
    assert "its weights are stored as fp8; the plan trains them in bfloat16" in notes
    assert "its own code (modeling_llama.Mine) is not executed" in notes
    assert "its layers of multi-token prediction (1) are not in LlamaForCausalLM" in notes


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        (
            {"model_type": "lama", "architectures": []},
            UsageError,
            "transformers has no model_type 'lama'.*llama",
        ),
        (
            {
                "model_type": "its_own",
                "architectures": ["Theirs"],
                "auto_map": {"AutoModel": "theirs.Model"},
            },
            UsageError,
            "Its own code .theirs.Model. is not executed",
        ),
        ({"num_hidden_layers": 10**9}, ModelError, "num_hidden_layers is 1000000000; at most 1024"),
        ({"depths": [1, 10**9]}, ModelError, "depths is 1000000000; at most 1024"),
        ({"hidden_size": "wide"}, ModelError, "hidden_size"),
        ({"num_attention_heads": 0}, ModelError, "config.json"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load_any(written(tmp_path, **more), ModelOptions())


def test_options_that_do_not_apply_are_named(model: str) -> None:
    with pytest.raises(UsageError, match="not shapes"):
        load_any(model, ModelOptions(shapes={"input_ids": (1, 2)}))
    with pytest.raises(UsageError, match="--seq is 0"):
        load_any(model, ModelOptions(dims={"sequence": 0}))


def test_parameters_are_frozen_by_pattern(model: str) -> None:
    loaded = load_any(model, ModelOptions(batch=2, frozen=("*.mlp.*", "lm_head.weight")))
    warm = {tensor.name for tensor in loaded.graph.parameters if tensor.trainable}
    assert "model.layers.0.self_attn.q_proj.weight" in warm
    assert not any(".mlp." in name or "lm_head" in name for name in warm)
    with pytest.raises(UsageError, match="no parameter of the model is named 'mlp'"):
        load_any(model, ModelOptions(frozen=("mlp",)))


def test_models_are_listed_and_described(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    assert "qwen3_next" in capsys.readouterr().out
    assert run(["models", model]) == 0
    assert "115.0 thousand parameters" in capsys.readouterr().out
    assert run(["models", model, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    total = 2 * 256 * 64 + 2 * layer + 64
    assert (said["module"], said["parameters"], said["active"]) == (
        "LlamaForCausalLM",
        total,
        total,
    )
