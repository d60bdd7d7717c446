"""Observations of the model on one device by the check of a plan."""

from __future__ import annotations

import torch
from torch import nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.checking.check import observe_model


def test_gradients_that_the_caller_left_do_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inputs = torch.randn(3, 4)
    graph = load_model(model, ModelOptions(), (inputs,)).graph
    fresh = observe_model(model, graph, [inputs], optimizer="none", steps=1)
    assert fresh.gradients.keys() == {"weight", "bias"}
    model(inputs).sum().backward()
    again = observe_model(model, graph, [inputs], optimizer="none", steps=1)
    assert all(torch.equal(again.gradients[name], value) for name, value in fresh.gradients.items())
