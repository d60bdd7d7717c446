"""An export refuses what its program would not do again, and says each error once."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions, load_model

X = torch.ones(4, 3)


class _Skipping(nn.Module):
    """Skips its layer by a drawn number."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.draw() < 2 else x


class _Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_drawn_on_the_host_are_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(ModelError, match="_Skipping draws numbers by random"):
        load_model(_Skipping(draw), ModelOptions(), (X,))


def test_a_number_that_is_not_drawn_is_taken() -> None:
    assert load_model(_Skipping(lambda: 1.0), ModelOptions(), (X,)).graph.operators


def test_an_error_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(ModelError, match="cannot capture _Wrong"):
            load_model(_Wrong(), ModelOptions(), (X,))
    finally:
        log.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.name == log.name]
    assert not log.disabled
