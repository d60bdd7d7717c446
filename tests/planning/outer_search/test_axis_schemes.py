"""A scheme for each axis of the mesh: data parallel on one, tensor parallel on the other."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import UsageError
from autopar.sharding.layout import Kind, parse_layout


def model() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    layers = (torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return torch.nn.Sequential(*layers), (torch.zeros(16, 64),)


def planned(scheme: str) -> autopar.Plan:
    module, inputs = model()
    return autopar.plan(module, inputs, devices=4, cluster="local-cpu", mesh=(2, 2), scheme=scheme)


@pytest.mark.parametrize("data", [0, 1])
def test_each_axis_has_its_scheme(data: int) -> None:
    schemes = ["megatron", "megatron"]
    schemes[data] = "data"
    plan = planned(",".join(f"rank{axis}:{name}" for axis, name in enumerate(schemes)))
    for name, parameter in plan.parameters.items():
        layout = parse_layout(parameter.storage)
        assert layout[data].kind is not Kind.SPLIT
        if len(parameter.shape) == 2:
            assert layout[1 - data].kind is Kind.SPLIT, name
    reduced = {(c.phase, c.axis) for c in plan.collectives if c.nbytes > 64}
    assert ("forward", f"rank{1 - data}") in reduced and ("backward", f"rank{data}") in reduced


def test_the_same_scheme_on_all_axes() -> None:
    assert planned("rank0:data,rank1:data").predicted == planned("data").predicted


@pytest.mark.parametrize(
    "text, message",
    [
        ("rank0:dta", "unknown scheme 'dta'"),
        ("gpu:data", "no axis 'gpu'"),
        ("rank0:data,x", "AXIS:NAME"),
    ],
)
def test_bad_texts(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(text)
