"""Batches of configured models: images, sounds, videos and texts of the sizes asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.model import LoadedModel
from autopar.plan_origin import model_of_plan
from autopar.runtime.run import run_plan
from tests.end_to_end.small_types import small_configuration

pytest.importorskip("transformers")

OWN: Mapping[str, Mapping[str, Any]] = {
    "whisper": {"decoder_start_token_id": 1, "max_target_positions": 32},
    "speech_to_text": {"input_feat_per_channel": 8},
    "llava": {"image_token_index": 5},
    "internvl": {"image_token_id": 5},
    "videomae": {"num_frames": 4},
    **{
        kind: {"image_token_id": 5}
        for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "idefics3", "smolvlm")
    },
}
"""Keys in which types differ from the small sizes."""
_OF_QWEN = {
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "window_size": 32,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
NESTED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "qwen2_vl": {
        "vision_config": {**_OF_QWEN, "hidden_size": 32},
        "text_config": {"rope_parameters": _ROPE},
    },
    "qwen2_5_vl": {"vision_config": _OF_QWEN, "text_config": {"rope_parameters": _ROPE}},
    "qwen3_vl": {"vision_config": _OF_QWEN, "text_config": {"rope_parameters": _ROPE}},
}
"""Keys of their parts."""
BATCHES: Mapping[tuple[str, str], tuple[Mapping[str, int], Mapping[str, tuple[int, ...]]]] = {
    ("vit", "own"): ({}, {"pixel_values": (4, 3, 32, 32), "labels": (4,)}),
    ("siglip", "own"): ({}, {"pixel_values": (4, 3, 32, 32), "labels": (4,)}),
    ("videomae", "own"): ({}, {"pixel_values": (4, 4, 3, 32, 32), "labels": (4,)}),
    ("whisper", "own"): ({"sequence": 8}, {"input_features": (4, 8, 32), "labels": (4, 8)}),
    ("speech_to_text", "frames"): (
        {"sequence": 8, "frames": 12},
        {"input_features": (4, 12, 8), "labels": (4, 8)},
    ),
    ("audio-spectrogram-transformer", "own"): ({}, {"input_values": (4, 1024, 8), "labels": (4,)}),
    ("llava", "text"): ({"sequence": 24}, {"input_ids": (4, 24), "labels": (4, 24)}),
    ("llava", "image"): (
        {"sequence": 24, "image": 32},
        {"input_ids": (4, 24), "pixel_values": (4, 3, 32, 32), "labels": (4, 24)},
    ),
    ("bart", "own"): ({"sequence": 8}, {"input_ids": (4, 8), "labels": (4, 8)}),
}
"""Sizes that are asked for, and the shapes of inputs that a type then has."""
SPLIT: Mapping[str, tuple[str | None, Mapping[str, int]]] = {
    "vit": ("zero3", {}),
    "whisper": ("zero3", {"sequence": 8}),
    # What is scattered among the tokens depends on all of them, so that no scheme follows a batch.
    "llava": (None, {"sequence": 24, "image": 32}),
}
PICTURED: Mapping[str, tuple[tuple[int, ...], bool]] = {
    "qwen2_vl": ((4 * 16, 3 * 2 * 8 * 8), True),
    "qwen2_5_vl": ((4 * 16, 3 * 2 * 8 * 8), True),
    "qwen3_vl": ((4 * 16, 3 * 2 * 8 * 8), True),
    "mistral3": ((4, 3, 32, 32), True),
    "idefics3": ((4, 1, 3, 32, 32), False),
    "smolvlm": ((4, 1, 3, 32, 32), False),
}
"""The shape of four images of types that choose rows of them, and whether they are told sizes."""
"""Types that run, with the schemes of their plans and their sizes."""


def loaded(folder: Path, kind: str, **options: Any) -> LoadedModel:
    """A small model of a type."""
    keys = {**small_configuration(kind), **OWN.get(kind, {})}
    for part, own in NESTED.get(kind, {}).items():
        keys[part] = {**keys[part], **own}
    (folder / "config.json").write_text(json.dumps(keys))
    return load_any(f"hf:{folder}", ModelOptions(batch=4, dtype="float64", **options))


@pytest.mark.parametrize(("kind", "case"), BATCHES)
def test_batches(tmp_path: Path, kind: str, case: str) -> None:
    asked, shapes = BATCHES[kind, case]
    model = loaded(tmp_path, kind, dims=asked)
    graph = model.graph
    assert {name: graph.tensors[name].shape for name in graph.inputs} == shapes
    for name in set(shapes) - {"labels"}:
        assert f"{name} {' x '.join(map(str, shapes[name]))}" in model.notes[0]


@pytest.mark.gloo
@pytest.mark.parametrize("kind", SPLIT)
def test_a_split_batch_equals_one_device(tmp_path: Path, kind: str) -> None:
    """The text of an image has a token for each of its rows, which the model's code asserts."""
    scheme, sizes = SPLIT[kind]
    model = loaded(tmp_path, kind, dims=sizes)
    plan = plan_loaded(model, devices=2, cluster="local-cpu", mesh=(2,), scheme=scheme).plan
    assert plan.devices == 2
    report = run_plan(model_of_plan(f"hf:{tmp_path}", plan), plan, check=True)
    assert report.ok, report.check


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", PICTURED)
def test_images_of_sizes_that_shapes_follow_equal_one_device(tmp_path: Path, kind: str) -> None:
    shape, told = PICTURED[kind]
    sizes = {"sequence": 24, "image": 32}
    model = loaded(tmp_path, kind, dims=sizes)
    assert model.graph.tensors["pixel_values"].shape == shape
    assert told == any("a constant of the plan, no input" in note for note in model.notes)
    assert model.build is not None
    built = {name: tuple(p.shape) for name, p in model.build().named_parameters()}
    assert {tensor.name: tensor.shape for tensor in model.graph.parameters} == built
    plan = plan_loaded(model, devices=2, cluster="local-cpu", mesh=(2,), scheme="zero3").plan
    report = run_plan(model_of_plan(f"hf:{tmp_path}", plan), plan, check=True)
    assert report.ok, report.check


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_inference_of_two_stacks_has_tokens_of_the_decoder(tmp_path: Path, kind: str) -> None:
    graph = loaded(tmp_path, kind, dims={"sequence": 8}, train=False).graph
    assert graph.tensors["decoder_input_ids"].shape == (4, 8)
    assert "labels" not in graph.inputs


def test_an_image_is_offered(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llava", dims={"sequence": 24})
    assert model.notes[0].endswith("(--batch, --image for an image of each text, --seq)")
    assert any("model.vision_tower" in note and "takes no part" in note for note in model.notes)


def test_an_image_is_of_the_size_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_configuration("convnext")))
    model = load_any(f"hf:{tmp_path}", ModelOptions(batch=2, dims={"image": 64}))
    assert model.graph.tensors["pixel_values"].shape == (2, 3, 64, 64)


@pytest.mark.parametrize(
    ("kind", "asked", "text"),
    [
        ("vit", {"sequence": 7}, "ViTForImageClassification takes no --seq; its batch has --image"),
        ("llama", {"image": 32}, "LlamaForCausalLM takes no --image"),
        ("vit", {"image": 0}, "--image is 0; it must be at least 1"),
        (
            "llava",
            {"image": 32, "sequence": 9},
            "--seq is 9, and the image of a sample alone has 16",
        ),
        ("qwen2_vl", {"image": 40}, "an image of Qwen2VL.* is cut into squares of 16"),
    ],
)
def test_sizes_that_do_not_apply_are_refused(
    tmp_path: Path, kind: str, asked: dict[str, int], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        loaded(tmp_path, kind, dims=asked)
