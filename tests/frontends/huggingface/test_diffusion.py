"""Transformers of diffusion: classes of diffusers by their configuration, planned and run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import run
from autopar.configured import load_any
from autopar.errors import ModelError, UsageError
from autopar.frontends.load import ModelOptions
from autopar.plan import Plan
from autopar.plan_origin import model_of_batch

pytest.importorskip("diffusers")

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "DiTTransformer2DModel": {**_HEADS, "sample_size": 8, "num_embeds_ada_norm": 10},
    "SD3Transformer2DModel": {
        **_HEADS,
        "sample_size": 8,
        "joint_attention_dim": 24,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 20,
        "pos_embed_max_size": 16,
    },
    "FluxTransformer2DModel": {
        **_HEADS,
        "in_channels": 16,
        "num_single_layers": 2,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 20,
        "axes_dims_rope": [4, 6, 6],
    },
    "WanTransformer3DModel": {**_HEADS, "text_dim": 24, "freq_dim": 16, "ffn_dim": 64},
}
"""Narrow classes."""
BATCHES: Mapping[str, tuple[Mapping[str, int], Mapping[str, tuple[int, ...]]]] = {
    "DiTTransformer2DModel": (
        {},
        {"hidden_states": (4, 4, 8, 8), "timestep": (4,), "class_labels": (4,)},
    ),
    "SD3Transformer2DModel": (
        {"image": 16, "sequence": 6},
        {
            "hidden_states": (4, 4, 16, 16),
            "encoder_hidden_states": (4, 6, 24),
            "pooled_projections": (4, 20),
            "timestep": (4,),
        },
    ),
    "FluxTransformer2DModel": (
        {"image": 8, "sequence": 6},
        {
            "hidden_states": (4, 16, 16),
            "encoder_hidden_states": (4, 6, 24),
            "pooled_projections": (4, 20),
            "timestep": (4,),
            "img_ids": (16, 3),
            "txt_ids": (6, 3),
        },
    ),
    "WanTransformer3DModel": (
        {"image": 8, "frames": 3, "sequence": 6},
        {"hidden_states": (4, 4, 3, 8, 8), "encoder_hidden_states": (4, 6, 24), "timestep": (4,)},
    ),
}
"""Sizes that are asked for, and the shapes of inputs that a class then has."""


def written(folder: Path, name: str, **more: Any) -> str:
    """A configuration in `folder`, as a MODEL."""
    keys = {"_class_name": name, "_diffusers_version": "0.36.0", **CLASSES.get(name, {}), **more}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return f"hf:{folder}"


@pytest.mark.parametrize("name", CLASSES)
def test_inputs_follow_the_signature(tmp_path: Path, name: str) -> None:
    asked, shapes = BATCHES[name]
    loaded = load_any(written(tmp_path, name), ModelOptions(batch=4, dims=asked))
    graph = loaded.graph
    assert {name: graph.tensors[name].shape for name in graph.inputs} == shapes
    own = getattr(import_module("diffusers"), name).from_config(dict(CLASSES[name]))
    assert {tensor.name: tensor.shape for tensor in graph.parameters} == {
        name: tuple(value.shape) for name, value in own.named_parameters()
    }
    assert "its loss is the mean square of what it returns" in " ".join(loaded.notes)


@pytest.mark.gloo
def test_a_split_class_equals_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, "SD3Transformer2DModel")
    path = str(tmp_path / "plan.json")
    run(
        f"plan {model} --devices 2 --cluster local-cpu --batch 4 --seq 6 --dtype float32 "
        f"--scheme zero3 --no-compare -o {path}".split()
    )
    assert (
        "hidden_states 4 x 4 x 8 x 8, encoder_hidden_states 4 x 6 x 24" in capsys.readouterr().out
    )
    assert Plan.load(path).devices == 2
    assert run(["run", path, "--model", model, "--check"]) == 0
    again = model_of_batch(model, Plan.load(path), 2)
    assert again.graph.tensors["encoder_hidden_states"].shape == (2, 6, 24)


def test_the_folder_of_a_pipeline_has_its_network_in_a_folder(tmp_path: Path) -> None:
    written(tmp_path / "transformer", "DiTTransformer2DModel")
    loaded = load_any(f"hf:{tmp_path}", ModelOptions(batch=2))
    assert loaded.graph.name == "DiTTransformer2DModel"


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("FluxTransformer3DModel", UsageError, "class of diffusers 'FluxTransformer3DModel'"),
        ("AutoencoderKL", UsageError, "unknown class of diffusers"),
        ("DiffusionPipeline", UsageError, "unknown class of diffusers"),
        ("HunyuanVideoTransformer3DModel", ModelError, "needs encoder_attention_mask"),
    ],
)
def test_other_classes_are_refused(
    tmp_path: Path, name: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load_any(written(tmp_path, name), ModelOptions())


def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    name = "DiTTransformer2DModel"
    own = getattr(import_module("diffusers"), name).from_config(dict(CLASSES[name]))
    own.save_pretrained(tmp_path)
    module = load_any(f"hf:{tmp_path}", ModelOptions(dtype="float32")).module
    values = dict(module.named_parameters())
    assert all(value.equal(values[name]) for name, value in own.named_parameters())


def test_a_missing_project_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(UsageError, match=r"needs diffusers.*pip install 'autopar\[diffusers\]'"):
        load_any(written(tmp_path, "DiTTransformer2DModel"), ModelOptions())
