"""Types of models by their configuration alone: searched, ZeRO 3, Megatron's and pipelined plans
compute on 2 and 4 ranks what one device does.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.model import LoadedModel
from autopar.runtime.run import run_plan
from tests.end_to_end.small_types import REFUSED, TYPES, WITH_EXPERTS, small_configuration

pytest.importorskip("transformers")

PLANS = {
    "searched": (2, None),
    "zero3": (2, "zero3"),
    "megatron": (2, "megatron"),
    "pipeline": (4, "pipeline-1f1b 2 x data 2"),
}
"""Devices and scheme of each plan."""


@functools.cache
def _loaded(folder: Path, kind: str) -> LoadedModel:
    path = folder / kind
    path.mkdir()
    (path / "config.json").write_text(json.dumps(small_configuration(kind)))
    dtype = "float32" if kind in WITH_EXPERTS else "float64"
    return load_any(f"hf:{path}", ModelOptions(batch=8, dims={"sequence": 16}, dtype=dtype))


@pytest.fixture(name="folder", scope="module")
def folder_of_configurations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", TYPES)
def test_one_device_is_equalled(folder: Path, kind: str, name: str) -> None:
    devices, scheme = PLANS[name]
    model = _loaded(folder, kind)
    # In float32 Adam's division by the root of squares makes rounding of small gradients large.
    optimizer = "sgd" if kind in WITH_EXPERTS else "adamw"
    asked = {"devices": devices, "cluster": "local-cpu", "scheme": scheme, "optimizer": optimizer}
    if (kind, name) in REFUSED:
        with pytest.raises(UsageError, match="cannot be split"):
            plan_loaded(model, **asked)
        return
    report = run_plan(model, plan_loaded(model, **asked).plan, check=True)
    assert report.ok, report.check
