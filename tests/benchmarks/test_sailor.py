"""Sailor's rows: runs on devices of one kind, float32 as tensor units read it, single layers."""

from __future__ import annotations

import pytest

from benchmarks.validating.missing import Missing
from benchmarks.validating.sailor import framework, layer_sample, node, sailor

RUN = {
    "cluster": "mit",
    "model": "OPT",
    "layers": "4",
    "hidden": "512",
    "heads": "8",
    "seq": "512",
    "vocab": "4096",
    "gpu_types": "x",
    "gpus": "16",
    "micro_batch": "2",
    "global_batch": "32",
    "step_s": "2.0",
    "peak_mem_bytes": "5e9",
    "trap": "",
    # The embedding and the head count as a layer each.
    "stages": "L3:GH-96xTP4*2 ; L3:GH-96xTP4*2",
}
LAYER = {
    "model": "GPT",
    "hidden": "1024",
    "heads": "16",
    "kv_heads": "16",
    "ffn": "4096",
    "seq": "1024",
    "gpu": "A100-40",
    "micro_batch": "2",
    "tp": "1",
    "layer_fwd_s": "0.004",
    "layer_bwd_s": "0.008",
}


def test_replicas_on_equal_devices_are_a_run() -> None:
    plan = sailor(RUN)
    c = plan.configuration
    assert (c.dealt, c.tensor, c.data, c.pipeline, c.devices) == ((2, 2), 4, 2, 2, 16)
    assert plan.cluster.devices == 16 and not plan.cluster.joined
    assert c.micro_batches == 8 and c.dtype == "float32"
    sample = plan.sample()
    assert sample.predicted and sample.memory == 5e9
    assert sample.told_memory == plan.priced().memory, "with the context"
    uneven = sailor(RUN | {"stages": "L4:GH-96xTP4*2 ; L2:GH-96xTP4*2"})
    assert uneven.configuration.dealt == (3, 1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"trap": "26 layer entries, model has 34"}, "a trap"),
        ({"stages": "L3:RTX-3090xTP8*1 ; 8"}, "not understood"),
        ({"stages": "L5:GH-96xTP4*1"}, "the stages have 3 layers"),
        ({"stages": "L3:RTX-3090xTP8*1+RTX-2080xTP8*1 ; L3:Titan-RTXxTP8*2"}, "several kinds"),
        ({"stages": "L3:GH-96xTP4*2 ; L3:GH-96xTP2*4"}, "several kinds"),
        ({"stages": "L3:GH-96xTP4*2 ; L3:GH-96xTP4*4", "gpus": "24"}, "replicas"),
        ({"stages": "L3:H20xTP8*1 ; L3:H20xTP8*1"}, "no machine for H20"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Missing, match=reason):
        sailor(RUN | changed)


def test_tensor_units_read_float32_where_there_are_some() -> None:
    """Half as fast as 16 bits (NVIDIA A100 data sheet: 156 of 312 TFLOP/s); Turing and Volta add up
    in float32.
    """
    assert node("A100-40").device.flops("tfloat32") == 156e12
    assert node("Titan-RTX").device.flops("tfloat32") == 16.3e12
    assert (framework("A100-40").kernels.products, framework("V100-16").kernels.products) == (
        "tfloat32",
        "",
    )


def test_layers_are_scored_whole_and_split() -> None:
    whole, one = layer_sample(LAYER)
    split, two = layer_sample(LAYER | {"tp": "4"})
    assert (whole, split) == ("sailor_layers whole", "sailor_layers split")
    assert (
        one.measured == pytest.approx(0.012)
        and one.predicted
        and two.predicted
        and two.predicted < one.predicted
    )
    assert layer_sample(LAYER | {"model": "OPT-30"})[0] == "sailor_layers OPT-30 whole"
    with pytest.raises(Missing, match="seq"):
        layer_sample(LAYER | {"seq": ""})
