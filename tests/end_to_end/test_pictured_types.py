"""Vision-language models with images: searched, ZeRO 3, Megatron's and pipelined plans compute on 2
and 4 ranks what one device does.
"""

from __future__ import annotations

import functools

import pytest

from autopar.api import plan_loaded
from autopar.errors import RunError
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.runtime.run import run_plan
from tests.end_to_end.small_pictures import PICTURED, misplaced, pictured
from tests.end_to_end.test_configured_types import PLANS

pytest.importorskip("transformers")


@functools.cache
def _loaded(kind: str, moved: bool = False) -> LoadedModel:
    module, inputs = pictured(kind)
    if moved:
        inputs = misplaced(inputs, PICTURED[kind].tokens)
    return load_model(module, ModelOptions(), example_inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", PICTURED)
def test_one_device_is_equalled(kind: str, name: str) -> None:
    devices, scheme = PLANS[name]
    model = _loaded(kind)
    plan = plan_loaded(model, devices=devices, cluster="local-cpu", scheme=scheme).plan
    report = run_plan(model, plan, check=True)
    assert report.ok, report.check


@pytest.mark.slow
def test_features_travel_to_image_tokens_of_other_samples() -> None:
    """On two ranks the features of an image go to the prompt before; micro-batches would not have
    them.
    """
    model = _loaded("internvl", moved=True)
    plan = plan_loaded(model, devices=2, cluster="local-cpu", scheme="zero3").plan
    assert run_plan(model, plan, check=True).ok
    pipelined = plan_loaded(
        model, devices=4, cluster="local-cpu", scheme="pipeline-1f1b 2 x data 2", micro_batches=4
    ).plan
    with pytest.raises(RunError, match="every sample needs as many of its own"):
        run_plan(model, pipelined)
