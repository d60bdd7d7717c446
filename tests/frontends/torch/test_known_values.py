"""Known values against those that torch computes, and what makes a value unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from autopar.frontends.torch.masks.bands import Band
from autopar.frontends.torch.masks.known_values import KnownValues

BATCH = 3
COUNT = 5


def places() -> Tensor:
    return torch.arange(COUNT).expand(BATCH, COUNT)


def before() -> Tensor:
    """A mask of packed sequences, as transformers finds them in counted places."""
    first = places()[:, :1] - 1
    return (torch.diff(places(), prepend=first, dim=-1) != 1).cumsum(-1)


# What a module computes of nothing -> the most elements that are laid out for it.
VALUES: Mapping[str, tuple[Callable[[], Tensor], int]] = {
    "filled": (lambda: torch.full((BATCH, COUNT), 2.5), 1),
    "repeated": (places, COUNT),
    "an elementwise chain": (lambda: (places() * 2 - 1).float() / 4 + torch.ones(BATCH, 1), COUNT),
    "along the places": (before, COUNT),
    "reshaped": (lambda: before().view(BATCH, 1, COUNT, 1) + places().view(BATCH, 1, 1, COUNT), 25),
    "of every batch its own": (
        lambda: torch.arange(BATCH).unsqueeze(1) + torch.arange(COUNT),
        BATCH * COUNT,
    ),
    "a cast before a sum": (lambda: (places() > 2).double() + torch.ones(BATCH, 1), COUNT),
    "turned": (lambda: torch.arange(6).view(2, 3).t().flip(0)[1], 6),
    "joined": (lambda: torch.cat([places(), places()[:, :2]], dim=1), 0),
    "a band times a number": (lambda: (places()[:1].t() >= places()[:1]) * 3, 0),
    "a band chosen by": (lambda: torch.where(places()[:1].t() > places()[:1], 0.0, -1.0), 0),
    "a band and a row": (
        lambda: (places()[:1].t() >= places()[:1]) & (torch.arange(COUNT) != 2),
        COUNT * COUNT,
    ),
    "one band or another": (
        lambda: (places()[:1].t() > places()[:1]) | (places()[:1].t() < places()[:1] - 1),
        COUNT * COUNT,
    ),
    "a band in single precision times one in double": (
        lambda: (places()[:1].t() > places()[:1]).float() * torch.tensor(2.0, dtype=torch.float64),
        0,
    ),
}


class Makes(nn.Module):
    """Gives a value made of nothing, beside its input."""

    def __init__(self, value: Callable[[], Tensor]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, self.value()


def known(value: Callable[[], Tensor]) -> Tensor | Band | None:
    model = import_torch(Makes(value), (torch.ones(2),))
    name = model.output_names[1]
    assert name is not None
    return KnownValues(model.graph, model.constants).value(name)


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    build, most = VALUES[name]
    value = known(build)
    assert value is not None
    whole = value.whole() if isinstance(value, Band) else value
    assert whole is not None and isinstance(value, Band) == (name.startswith("a band") and not most)
    wanted = build()
    assert whole.dtype == wanted.dtype and torch.equal(whole.expand(wanted.shape), wanted)
    if most and not isinstance(value, Band):
        assert value.numel() <= most


UNKNOWN: Mapping[str, Callable[[], Tensor]] = {
    "random": lambda: torch.rand(COUNT) + torch.ones(COUNT),
    "an operator without a rule here": lambda: torch.ones(2, 2) @ torch.ones(2, 2),
    "none at all": lambda: torch.ones(0, COUNT) + 1,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_values(name: str) -> None:
    assert known(UNKNOWN[name]) is None
