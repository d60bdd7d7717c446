"""A planned module answers for what is plain of the original, and keeps none of its weights."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@dataclass
class Config:
    """As of a transformers model."""

    width: int = 16
    names: list[str] = field(default_factory=lambda: ["a", "b"])


class Holder:
    """Something of the user's that holds a module."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Layer(nn.Module):
    """A layer with a bias that is absent, and a number of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(16, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(16))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.drop(self.linear(x) * self.scale)
        return output


class Model(nn.Module):
    """Containers of every kind, plain attributes, and attributes that hold weights."""

    kind = "tiny"
    template = torch.zeros(3)

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList(Layer(index) for index in range(3))
        self.named = nn.ModuleDict({"one": nn.Linear(16, 16), "act": nn.Tanh()})
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.Identity())
        self.shifts = nn.ParameterList(
            [nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))]
        )
        self.gains = nn.ParameterDict({"first": nn.Parameter(torch.ones(16))})
        self.original = nn.Linear(16, 16)
        self.absent: nn.Module | None = None
        self.register_module("nothing", None)
        self.width = 16
        self.call = functools.partial(torch.add, 1)
        linear = self.head[1]
        self.heavy_list = [Holder(self.named)]
        self.heavy_queue = deque([linear])
        self.heavy_method = self.named.forward
        self.heavy_function = lambda x: linear(x)
        self.heavy_partial = functools.partial(torch.add, torch.ones(2))
        self.plain_tensor = torch.ones(2)

    @property
    def count(self) -> int:
        """How many parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def generate(self) -> None:
        """A method."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.named["act"](self.named["one"](x)) + self.shifts[0] + self.shifts[1]
        output: Tensor = self.original(self.head(x * self.gains["first"]))
        return output


def build() -> Model:
    torch.manual_seed(0)
    return Model()


KINDS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
HEAVY = (
    "heavy_list",
    "heavy_queue",
    "heavy_method",
    "heavy_function",
    "heavy_partial",
    "plain_tensor",
    "template",
)


def _read(module: ParallelModule) -> dict[str, Any]:
    """The attributes that scripts read of a module."""
    original = build()
    with pytest.raises(
        PlanError, match=r"this Layer is part of a planned model(.|\n)*call the whole"
    ):
        module.layers[0](X)
    for part in (module.head, module.layers, module.named, module.head[2]):
        with pytest.raises(PlanError, match="no forward pass of its own"):
            part(X)
    with pytest.raises(AttributeError, match="'generate' is a method of Model"):
        module.generate()
    with pytest.raises(AttributeError, match="a planned Model has no attribute 'missing'"):
        module.missing  # noqa: B018
    assert not any(hasattr(module, name) for name in (*HEAVY, "_hidden"))
    assert {"config", "width", "kind", "count", "layers", "loss"} <= set(dir(module)) and not {
        *HEAVY,
        "generate",
    } & set(dir(module))
    assert "drop" in repr(module.layers[0]) and "Layer" in repr(module.layers)
    twin = copy.deepcopy(module)
    assert (
        twin.config is module.config
        and len(twin.layers) == 3
        and twin.layers[0] is not module.layers[0]
    )
    return {
        "config": module.config.width,
        "width": module.width,
        "kind": module.kind,
        "absent": module.absent,
        "nothing": module.nothing,
        "call": module.call(1),
        "count": module.count == original.count,
        "lists": [layer.index for layer in module.layers],
        "slice": [layer.index for layer in module.layers[1:]],
        "length": (len(module.layers), len(module.head), len(module.named)),
        "bias": module.layers[2].linear.bias,
        "shape": module.layers[1].linear.weight.shape,
        "in": module.layers[0].linear.in_features,
        "names": list(module.named),
        "member": "one" in module.named,
        "sequence": [type(part).__mro__[1:] != () for part in module.head],
        "parameters": [
            len(module.shifts),
            list(module.gains),
            module.gains["first"].shape == (16,),
            module.shifts[1].shape == (16,),
        ],
        "submodule": module.get_submodule("layers.1.linear") is module.layers[1].linear,
        "original": module.original.out_features,
        "kinds": [
            isinstance(part, kind)
            for part, kind in zip((module.layers, module.head, module.named), KINDS, strict=True)
        ],
        "keys": list(module.state_dict()) == list(original.state_dict()),
        "equal": torch.allclose(module(X), original(X), atol=1e-5),
    }


EXPECTED = {
    "config": 16,
    "width": 16,
    "kind": "tiny",
    "absent": None,
    "nothing": None,
    "call": 2,
    "count": True,
    "lists": [0, 1, 2],
    "slice": [1, 2],
    "length": (3, 3, 2),
    "bias": None,
    "shape": torch.Size([16, 16]),
    "in": 16,
    "names": ["one", "act"],
    "member": True,
    "sequence": [True] * 3,
    "parameters": [2, ["first"], True, True],
    "submodule": True,
    "original": 16,
    "kinds": [True] * 3,
    "keys": True,
    "equal": True,
}


def _all(plans: list[Plan]) -> list[dict[str, Any]]:
    return [_read(autopar.parallelize(build(), plan)) for plan in plans]


@pytest.mark.parametrize(("ranks", "schemes"), [(1, ["data"]), (2, ["megatron", "zero3"])])
def test_attributes(ranks: int, schemes: list[str]) -> None:
    plans = [
        autopar.plan(build(), (X,), devices=ranks, cluster="local-cpu", scheme=scheme)
        for scheme in schemes
    ]
    for result in run_ranks(_all, ranks, plans):
        assert result == [EXPECTED] * len(plans)


def _reset(scheme: str) -> dict[str, list[Tensor]]:
    """The parameters after a script has drawn them anew by type, planned and on one device."""
    plan = autopar.plan(build(), X, devices=2, cluster="local-cpu", scheme=scheme)
    planned = autopar.parallelize(build(), plan)
    alone = build()
    for module in (planned, alone):
        torch.manual_seed(1)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    drawn = planned.full_values({**planned.graph_parameters(), "nothing": None})
    return {name: [value.detach(), drawn[name]] for name, value in alone.named_parameters()}


@pytest.mark.parametrize("scheme", ["zero3", "megatron"])
def test_methods_of_torchs_layers_are_those_of_one_device(scheme: str) -> None:
    for told in run_ranks(_reset, 2, scheme):
        for wanted, actual in told.values():
            torch.testing.assert_close(actual, wanted)


def test_the_original_is_let_go() -> None:
    """Nothing of the planned module holds the original, or a weight of it, whatever is frozen."""
    gc.freeze()
    model = build()
    plan = autopar.plan(model, (X,), devices=1, cluster="local-cpu")
    module = autopar.parallelize(model, plan)
    held = [
        weakref.ref(model),
        *(weakref.ref(part) for part in model.layers),
        weakref.ref(model.layers[0].linear.weight),
    ]
    del model
    gc.collect()
    assert module.config.width == 16 and [one() for one in held] == [None] * len(held)
