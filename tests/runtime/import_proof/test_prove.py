"""An import is proved, or its first wrong operator is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.analysis.import_proofs import LEFT_OUT
from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import importer, reader
from autopar.model import LoadedModel
from autopar.runtime.import_proof import Proof, onnx_file, prove_import
from autopar.runtime.import_proof.sides import Side, Sides
from autopar.runtime.operators.functions import known_as

ROWS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Equal layers in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of rows."""
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        scores: Tensor = self.head(functional.gelu(x))
        return scores


class Powered(nn.Module):
    """A power in place, whose overload's name is another order out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Squares."""
        y: Tensor = self.linear(x).abs() + 1
        y **= 2
        return y


class Normed(nn.Module):
    """A weight that a region without gradients sees first, by an operator that gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """A step after one without gradients."""
        with torch.no_grad():
            x = self.linear(x)
        y: Tensor = self.linear(x)
        return y


class Centring(nn.Module):
    """A layer that subtracts a running mean, through which no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """Rows about the mean."""
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y: Tensor = self.linear(x - self.mean).tanh()
        return y


class Centred(nn.Module):
    """Equal layers, of which each is exported on its own, and a mean of what they give."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of mean zero."""
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            mean = x.mean(0)
        return x - mean


def loaded(module: nn.Module, **options: Any) -> LoadedModel:
    """A module, imported."""
    return load_model(module, ModelOptions(**options), (ROWS,))


def test_a_module_is_proved_with_two_layers_of_each_kind() -> None:
    assert prove_import(loaded(Net())) == Proof(
        proved=True, said="the import is proved on one device, 2 samples, 2 equal layers left out"
    )


@pytest.mark.parametrize(
    "kind", [Powered, Normed, lambda: Centred(Centring), lambda: Centred(lambda: nn.Linear(8, 8))]
)
def test_what_once_was_misread_is_proved(kind: Callable[[], nn.Module]) -> None:
    assert prove_import(loaded(kind())).proved


def test_a_lost_gradient_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "give_back_inputs", lambda program: None)
    with pytest.raises(ModelError, match=r"'linear.*original' gets a gradient in the model and"):
        prove_import(loaded(Normed()))


@pytest.mark.parametrize("layer", [Centring, lambda: nn.Linear(8, 8)])
def test_a_gradient_through_a_region_without_is_told(
    monkeypatch: pytest.MonkeyPatch, layer: Callable[[], nn.Module]
) -> None:
    monkeypatch.setattr(reader.Reader, "detached", lambda self, name: name)
    with pytest.raises(ModelError, match=r"the gradient 'layers\.1\."):
        prove_import(loaded(Centred(layer)))


def test_an_operator_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reader.plain_form

    def by_name(target: Any) -> Any:
        wrong = str(target) == "aten.pow_.Scalar"
        return torch.ops.aten.pow.Scalar if wrong else right(target)

    monkeypatch.setattr(reader, "plain_form", by_name)
    monkeypatch.setattr(reader.Reader, "_promoted", lambda *_: None)
    with pytest.raises(ModelError, match=r"'pow_/pointwise' \(autopar.pointwise\) cannot be run"):
        prove_import(loaded(Powered()))


def tanh_gelu(self: Tensor) -> Tensor:
    """Another function than the one that was written, by 1e-3 at most."""
    return functional.gelu(self, approximate="tanh")


class Doubling(torch.autograd.Function):
    """A function with a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The right values."""
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Twice what it should be."""
        return 2 * gradient


def test_the_first_operator_with_another_value_is_named() -> None:
    said = pytest.raises(ModelError, match=r"first operator with another value is 'gelu'")
    with known_as("aten.gelu.default", tanh_gelu), said:
        prove_import(loaded(Net()))


def test_the_parameter_of_a_wrong_gradient_is_named() -> None:
    def wrong(self: Tensor) -> Tensor:
        made: Tensor = Doubling.apply(self)
        return made

    said = pytest.raises(ModelError, match=r"the gradient 'layers.1.* its first reader is")
    with known_as("aten.relu.default", wrong), said:
        prove_import(loaded(Net()))


def test_why_nothing_is_proved() -> None:
    with torch.device("meta"):
        empty = Net()
    assert "its parameters have no values" in prove_import(loaded(empty)).said


def test_a_model_that_differs_from_itself_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Sides.written
    calls = itertools.count(1)

    def changing(sides: Sides) -> Side:
        side = written(sides)
        by = next(calls)
        return replace(side, outputs={name: by * value for name, value in side.outputs.items()})

    monkeypatch.setattr(Sides, "written", changing)
    with known_as("aten.gelu.default", tanh_gelu):
        proof = prove_import(loaded(Net()))
    assert not proof.proved and "change from call to call" in proof.said


def test_halves_are_proved_in_float32_and_the_module_stays_as_it_is() -> None:
    module = Net().half()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = load_model(module, ModelOptions(), (ROWS.half(),))
    assert prove_import(model).proved
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(value.grad is None for value in module.parameters())


def test_a_plan_says_what_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CHECKS", "on")
    asked: dict[str, Any] = {"devices": 2, "cluster": "local-cpu", "scheme": "data"}
    assert "proved on one device" in autopar.plan(Net(), (ROWS,), **asked).model.proof
    assert autopar.plan(Net(), (ROWS,), proof=False, **asked).model.proof == LEFT_OUT
    monkeypatch.setattr(importer, "give_back_inputs", lambda program: None)
    with pytest.raises(ModelError, match="gets a gradient in the model and none in its graph"):
        autopar.plan(Normed(), (ROWS,), **asked)
    autopar.plan(Normed(), (ROWS,), proof=False, **asked)


def mlp(folder: Path, *, shift: float = 0.0) -> Path:
    """An ONNX file of two products; a shift, which is taken back, loses digits between them."""
    draw = torch.Generator().manual_seed(1)
    weights = [
        numpy_helper.from_array(torch.randn(8, 8, generator=draw).numpy(), f"w{i}")
        for i in range(2)
    ]
    weights.append(numpy_helper.from_array(np.array(shift, np.float32), "shift"))
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node("Tanh", ["a"], ["b"], name="curve"),
        helper.make_node("Add", ["b", "shift"], ["c"], name="there"),
        helper.make_node("Sub", ["c", "shift"], ["d"], name="back"),
        helper.make_node("MatMul", ["d", "w1"], ["y"], name="last"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, weights)
    path = folder / "mlp.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(made, str(path))
    return path


def onnx_model(folder: Path) -> LoadedModel:
    """The file, imported at a batch of 64."""
    return load_model(mlp(folder), ModelOptions(batch=64))


def test_an_onnx_file_is_proved_by_another_runtime(tmp_path: Path) -> None:
    assert prove_import(onnx_model(tmp_path)).said == (
        "the import is proved on one device, inputs of 2x8"
    )


def test_a_wrong_operator_of_an_onnx_file_is_named(tmp_path: Path) -> None:
    model = onnx_model(tmp_path)
    said = pytest.raises(ModelError, match=r"first operator with another value is 'curve'")
    with known_as("aten.tanh.default", lambda self: torch.tanh(self) * 1.001), said:
        prove_import(model)


def test_a_file_that_makes_much_of_roundings_is_proved_operator_by_operator(tmp_path: Path) -> None:
    model = load_model(mlp(tmp_path, shift=1000.0), ModelOptions(batch=64))
    with known_as("aten.tanh.default", lambda self: torch.tanh(self) * (1 + 9e-6)):
        assert prove_import(model).proved
    said = pytest.raises(ModelError, match=r"first operator with another value is 'curve'")
    with known_as("aten.tanh.default", lambda self: torch.tanh(self) * 1.001), said:
        prove_import(model)


def test_a_wrong_gradient_of_an_onnx_file_is_found_by_differences(tmp_path: Path) -> None:
    model = onnx_model(tmp_path)

    def wrong(self: Tensor) -> Tensor:
        return torch.tanh(self.detach() + 2 * (self - self.detach()))

    said = pytest.raises(ModelError, match=r"the gradient of 'w0' is not the slope")
    with known_as("aten.tanh.default", wrong), said:
        prove_import(model)


def test_without_onnxruntime_onnx_itself_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file.importlib.util, "find_spec", lambda name: None)
    assert prove_import(onnx_model(tmp_path)).proved
