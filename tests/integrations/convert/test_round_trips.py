"""Plans written for other projects and read back: the same plan, or what was lost is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from convert_models import build
from test_convert import PLANS, REFUSED, planned

import autopar
from autopar.frontends.load import ModelOptions, load_model
from autopar.integrations.convert import convert
from autopar.integrations.importing import Hardware, import_configuration, read_configuration
from autopar.plan import Plan

READ = {
    "torchtitan": "back.toml",
    "megatron": "back.sh",
    "deepspeed": "back.json",
    "transformers": "back.py",
}
OTHER = {
    ("zero1", "torchtitan"),
    ("zero1", "transformers"),
    ("megatron", "torchtitan"),
    ("both", "torchtitan"),
    ("pipeline", "torchtitan"),
    # The plan cuts a layer, and the target has it whole.
    ("both", "transformers"),
}
"""Of which the target says less than the plan, so that another comes back."""


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: planned(name) for name in PLANS}


@pytest.mark.parametrize("target", READ)
@pytest.mark.parametrize("name", PLANS)
def test_plans_come_back(plans: dict[str, Plan], name: str, target: str, tmp_path: Path) -> None:
    plan = plans[name]
    if (name, target) in REFUSED:
        pytest.skip("the target cannot express it")
    converted = convert(plan, target, "0.2" if target == "torchtitan" else None)
    (tmp_path / READ[target]).write_text(converted.text)
    configuration = read_configuration(tmp_path / READ[target])
    assert configuration.source == target
    model = load_model(*(lambda module, inputs: (module, ModelOptions(), inputs))(*build()))
    back = import_configuration(
        configuration,
        model,
        Hardware(devices=4, cluster="dgx-h100", target="autopar", memory=70 * 2**30),
        compare=False,
    ).planned.plan
    same = (
        back.operators == plan.operators
        and back.mesh == plan.mesh
        and back.schedule == plan.schedule
        and back.stages == plan.stages
    )
    assert same or (converted.lost or configuration.lost), (
        "another plan comes back, and no word said so"
    )
    assert same == ((name, target) not in OTHER)


def test_styles_of_a_tied_head_come_back(tmp_path: Path) -> None:
    """The head's weight has the embedding's name; its style is for the module."""
    module, inputs = build()
    module.head.weight = module.embed.weight
    given: dict[str, Any] = {
        "stages": 1,
        "zero": 0,
        "micro_batches": 1,
        "recompute": "none",
        "scheme": "megatron",
    }
    plan = autopar.plan(module, inputs, devices=4, cluster="dgx-h100", **given)
    converted = convert(plan, "transformers")
    assert "'head': 'colwise" in converted.text
    (tmp_path / "back.py").write_text(converted.text)
    model = load_model(module, ModelOptions(), inputs)
    configuration = read_configuration(tmp_path / "back.py", "transformers")
    back = import_configuration(
        configuration, model, Hardware(devices=4, cluster="dgx-h100"), compare=False
    ).planned.plan
    assert (
        back.operators["head/linear"].strategy == plan.operators["head/linear"].strategy == ("n",)
    )
