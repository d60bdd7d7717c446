"""Layers and frames that a module leaves out by chance are in every step, which is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.configured import load_any
from autopar.frontends.load import ModelOptions
from tests.end_to_end.small_types import small_configuration

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "keys", "says"),
    [
        ("hubert", {"layerdrop": 0.9}, ["layerdrop is 0.9", "apply_spec_augment is true"]),
        ("m2m_100", {}, ["encoder_layerdrop is 0.05", "decoder_layerdrop is 0.05"]),
        ("bart", {}, []),
    ],
)
def test_all_layers_are_computed(
    tmp_path: Path, kind: str, keys: dict[str, Any], says: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**small_configuration(kind), **keys}))
    model = load_any(f"hf:{tmp_path}", ModelOptions(batch=4, dtype="float32"))
    told = [note for note in model.notes if "in its file" in note]
    assert len(told) == len(says)
    assert all(part in note for part, note in zip(says, told, strict=True))
    assert model.build is not None
    stored = {name for name, _ in model.build().named_parameters() if ".layers." in name}
    read = {name for operator in model.graph.operators for name in operator.inputs}
    assert stored and stored <= read
