"""Types of further families compute on two ranks what one device does, or are refused with the
place in their code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions
from autopar.model import LoadedModel
from autopar.runtime.run import run_plan
from tests.end_to_end.further_types import ADAMW, CASES, FURTHER, PICTURES, UNREAD, WIDE
from tests.end_to_end.small_types import small_configuration

pytest.importorskip("transformers")


def _loaded(folder: Path, kind: str, own: Mapping[str, Any], dtype: str) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps({**small_configuration(kind), **own}))
    dims = {} if kind in PICTURES else {"sequence": 16}
    return load_any(f"hf:{folder}", ModelOptions(batch=4, dtype=dtype, dims=dims))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_one_device_is_equalled(tmp_path: Path, kind: str, name: str) -> None:
    dtype = "float64" if kind in WIDE else "float32"
    model = _loaded(tmp_path, kind, {**FURTHER, **WIDE}[kind], dtype)
    assert model.build is not None
    built = {name: tuple(value.shape) for name, value in model.build().named_parameters()}
    assert {tensor.name: tensor.shape for tensor in model.graph.parameters} == built
    plan = plan_loaded(
        model,
        devices=2,
        cluster="local-cpu",
        mesh=(2,),
        scheme=None if name == "searched" else name,
        optimizer="adamw" if kind in ADAMW else "sgd",
    ).plan
    report = run_plan(model, plan, check=True)
    assert report.ok, report.check


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_not_read_is_refused_with_its_place(tmp_path: Path, kind: str) -> None:
    keys, says = UNREAD[kind]
    with pytest.raises(ModelError, match=re.escape(says)):
        _loaded(tmp_path, kind, keys, "float32")


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
