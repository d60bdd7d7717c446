"""Layers of one kind are exported once, and the graph is that of a whole export."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import ModelError
from autopar.frontends.torch import import_torch
from autopar.frontends.torch import importer as whole_importer
from autopar.model import TorchModel
from tests.frontends.torch.test_importer import compare_with_eager


class Layer(nn.Module):
    """A layer whose code reads a number of its own, and its place only if `by_place`."""

    def __init__(self, place: int, scale: float, *, by_place: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))
        self.place = place
        self.scale = scale
        self.by_place = by_place

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> tuple[torch.Tensor, None]:
        scale = self.scale * factor + (self.place if self.by_place else 0)
        return torch.relu(self.linear(x)) * scale + self.shift, None


class Stack(nn.Module):
    """Layers in a list, one of which may be called twice."""

    def __init__(self, layers: list[Layer], *, repeated: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.repeated = repeated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x, factor=2.0)
        if self.repeated:
            x, _ = self.layers[0](x)
        return x


def exports_of(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[TorchModel, int]:
    """The import of a module, and how many of its layers were exported."""
    counts: list[int] = []
    export = whole_importer.export_folded

    def counted(*given: Any) -> Any:
        program, layers = export(*given)
        counts.append(len(layers))
        return program, layers

    monkeypatch.setattr(whole_importer, "export_folded", counted)
    return import_torch(module, (torch.ones(4, 8),)), sum(counts)


def refused(*given: Any) -> TorchModel:
    raise ModelError("not folded")


def whole(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> TorchModel:
    with monkeypatch.context() as patch:
        patch.setattr(whole_importer, "_folded", refused)
        return import_torch(module, (torch.ones(4, 8),))


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        ([Layer(i, 2.0) for i in range(6)], 1),
        ([Layer(i, 2.0 + i % 2) for i in range(6)], 2),
        ([Layer(i, 2.0, by_place=True) for i in range(3)], 3),
    ],
    ids=["equal", "two kinds", "by their places"],
)
def test_kinds(layers: list[Layer], kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(layers)
    folded, count = exports_of(module, monkeypatch)
    assert count == kinds
    expected = whole(module, monkeypatch)
    assert folded.graph.fingerprint() == expected.graph.fingerprint()
    assert folded.reads == expected.reads
    assert folded.buffers == expected.buffers


def test_frozen_and_evaluated_layers_are_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(i, 2.0) for i in range(4)]
    layers[1].requires_grad_(False)
    layers[2].eval()
    folded, count = exports_of(Stack(layers), monkeypatch)
    assert count == 3
    trainable = {t.name: t.trainable for t in folded.graph.parameters}
    assert [trainable[f"layers.{i}.linear.weight"] for i in range(4)] == [True, False, True, True]


def test_a_shared_layer_keeps_one_set_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(i, 2.0) for i in range(3)]
    layers[2].linear.weight = layers[0].linear.weight
    module = Stack(layers)
    folded, _ = exports_of(module, monkeypatch)
    assert folded.graph.fingerprint() == whole(module, monkeypatch).graph.fingerprint()
    assert folded.aliases == {"layers.2.linear.weight": "layers.0.linear.weight"}


class Watched(Stack):
    """A stack with a part that holds the stack's list as well."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(layers)
        self.watch = nn.Module()
        self.watch.watched = nn.ModuleDict({"list": self.layers})


def test_layers_that_have_several_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Watched([Layer(place, 1.0) for place in range(3)])
    state = stack.state_dict(keep_vars=True)
    _, layers = exports_of(stack, monkeypatch)
    assert layers == 1
    assert all("forward" not in vars(layer) for layer in stack.layers)
    assert all(value is state[name] for name, value in stack.state_dict(keep_vars=True).items())


def test_a_layer_called_twice_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack([Layer(i, 2.0) for i in range(3)], repeated=True)
    folded, _ = exports_of(module, monkeypatch)
    assert folded.graph.fingerprint() == whole(module, monkeypatch).graph.fingerprint()


class Two(nn.Module):
    """A layer of two products, which may share a weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, None]:
        return self.second(self.first(x)) * factor, None


@pytest.mark.parametrize("tied", [(True, False), (False, True)])
def test_a_weight_tied_in_one_layer_only(
    tied: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: Any = [Two(tied=each) for each in tied]
    module = Stack(layers)
    folded, count = exports_of(module, monkeypatch)
    assert count == 2
    assert folded.graph.fingerprint() == whole(module, monkeypatch).graph.fingerprint()


class Telling(nn.Module):
    """A layer that leaves its result in a dict for the layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, told: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.linear(x) + told.get("before", torch.zeros(8))
        told["before"] = x
        return x


class Silent(Telling):
    """A layer that leaves nothing, though it could."""

    def forward(self, x: torch.Tensor, told: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(x) + told.get("before", torch.zeros(8))


class Told(nn.Module):
    """Layers that share a dict of some class."""

    def __init__(self, shared: Any = dict, layer: type[Telling] = Telling) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(3)])
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        told = self.shared()
        for layer in self.layers:
            x = layer(x, told)
        return x


@pytest.mark.parametrize("shared", [dict, UserDict])
def test_layers_that_share_a_dict_are_exported_whole(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Told(shared)
    folded = import_torch(module, (torch.ones(4, 8),))
    assert folded.unfolded == "layers.0 changes the containers that it is given"
    assert folded.graph.fingerprint() == whole(module, monkeypatch).graph.fingerprint()


def test_a_shared_container_that_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Told(UserDict, Silent)
    folded, count = exports_of(module, monkeypatch)
    assert count == 1 and folded.unfolded is None
    assert folded.graph.fingerprint() == whole(module, monkeypatch).graph.fingerprint()


class Returning(nn.Module):
    """A layer that returns its argument, or another view of it, beside a sum."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))
        self.view = view

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.bias, x[:] if self.view else x


class Changing(nn.Module):
    """Layers whose second result is changed in place, and with it their argument."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Returning(view=view) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for layer in self.layers:
            total, same = layer(x)
            same += 1
            x = total + x
        return x


@pytest.mark.parametrize("view", [False, True])
def test_a_returned_argument_is_that_argument(view: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Changing(view=view)
    folded = import_torch(module, (torch.ones(4, 8),))
    assert (folded.unfolded is not None) == view
    expected = whole(module, monkeypatch).graph
    assert [op.kind for op in folded.graph.operators] == [op.kind for op in expected.operators]
    compare_with_eager(module, torch.ones(4, 8))


class Peeking(Stack):
    """A stack that calls a part of its first layer before that layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: Any = self.layers[0]
        return super().forward(first.linear(x))


def test_a_part_that_is_called_outside_of_its_layer_is_written_twice() -> None:
    """Both calls of the part have its path, which the calls of layers alone do not tell apart."""
    module = Peeking([Layer(place, 2.0) for place in range(3)])
    graph = import_torch(module, (torch.ones(4, 8),)).graph
    names = [op.name for op in graph.operators]
    assert len(set(names)) == len(names)
    assert [op.inputs[1] for op in graph.operators if "linear" in op.name] == [
        f"layers.{place}.linear.weight" for place in (0, 0, 1, 2)
    ]


def test_the_module_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack([Layer(i, 2.0) for i in range(3)])
    exports_of(module, monkeypatch)
    assert not any("forward" in vars(part) for part in module.modules())
