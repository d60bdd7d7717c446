"""Files for torch and transformers run on two and four ranks: outputs and gradients of one device.

A dense decoder, one with experts, an encoder with a decoder, and a model of pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.integrations.convert import REACHES, convert
from autopar.plan import Plan
from autopar.sharding.mesh import Axis, Mesh
from benchmarks.convertible.cells import MOST
from benchmarks.convertible.executed import difference, executed
from benchmarks.convertible.models import build

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
MODELS = ("llama", "mixtral", "t5", "vit")
AXES: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "fsdp2": {2: ("shard",), 4: ("data", "shard")},
    "dtensor": {2: ("tensor",), 4: ("shard", "tensor")},
    "pipelining": {2: (), 4: ("shard",)},
    "transformers": {2: ("tensor",), 4: ("shard", "tensor")},
}
"""Axes of two devices, by target and number of ranks; those of pipelining are of two stages."""


def within(model: str, target: str, ranks: int, patched: pytest.MonkeyPatch) -> Plan:
    """The plan of a model within what a target can say, on a mesh of these axes."""
    axes = AXES[target][ranks]
    reaches = tuple(
        replace(reach, axes=axes or ("data",))
        for reach in REACHES[target]
        if {*axes} <= {*reach.axes}
    )
    patched.setitem(REACHES, target, reaches)
    given: dict[str, Any] = {"stages": 2, "micro_batches": 2} if target == "pipelining" else {}
    # A stage of one device has an axis, too.
    sizes = dict.fromkeys(axes, 2) or {"data": 1}
    mesh = Mesh(axes=tuple(Axis(name=n, size=size, level="nvlink") for n, size in sizes.items()))
    module, inputs = build(model)
    loaded = load_model(module, ModelOptions(), inputs)
    return plan_loaded(
        loaded, devices=ranks, cluster="dgx-h100", target=target, mesh=mesh, **given
    ).plan


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("target", AXES)
@pytest.mark.parametrize("model", MODELS)
def test_a_file_computes_what_one_device_does(
    model: str, target: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = within(model, target, ranks, monkeypatch)
    assert tuple(axis.name for axis in plan.mesh if axis.size > 1) == AXES[target][ranks]
    assert len(plan.stages) == 2 * (target == "pipelining")
    text = convert(plan, target).text
    assert difference(executed(model, target, text, plan)) < MOST
