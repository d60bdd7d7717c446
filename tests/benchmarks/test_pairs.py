"""Public runs of one model on two kinds of devices: how they compare, measured and predicted."""

from __future__ import annotations

import pytest

from benchmarks.validating.pairs import pairs, within
from benchmarks.validating.scores import Group, Sample


def run(
    device: str, measured: float, predicted: float, *, model: str = "70B", tokens: float = 100.0
) -> Sample:
    return Sample(
        label=f"{device} {measured}",
        measured=measured,
        predicted=predicted,
        pair=("framework", model, "bf16"),
        device=device,
        tokens=tokens,
    )


def test_a_ratio_is_that_of_tokens_a_second() -> None:
    group = Group(
        name="one",
        samples=(run("A100", 2.0, 2.0), run("H100", 1.0, 0.8), run("H100", 4.0, 3.2, tokens=400.0)),
    )
    (actual,) = pairs([group, Group(name="part of it", samples=group.samples[:1])])
    assert (actual.devices, actual.runs) == (("A100", "H100"), 3)
    assert actual.measured == pytest.approx(2.0) and actual.predicted == pytest.approx(2.5)
    assert actual.error == pytest.approx(0.25)
    assert within([actual]) == 0 and within([actual], 0.3) == 1


def test_other_models_and_rows_without_a_device_make_no_pair() -> None:
    samples = (
        run("A100", 2.0, 2.0),
        run("H100", 1.0, 1.0, model="8B"),
        Sample(label="x", measured=1.0, predicted=1.0),
    )
    assert pairs([Group(name="one", samples=samples)]) == []
