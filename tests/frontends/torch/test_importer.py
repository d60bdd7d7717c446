"""Importing PyTorch modules: what a graph holds, what is made of in-place operators and regions,
and what is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ModelError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import import_torch
from autopar.ir import Role
from autopar.model import TorchModel
from autopar.sharding.rules import tensors_with_gradient


class Block(nn.Module):
    """A linear layer around a function of its output."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)


def x() -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(3))


def kinds(imported: TorchModel) -> list[str]:
    return [op.kind for op in imported.graph.operators]


def compare_with_eager(module: nn.Module, *inputs: Tensor) -> None:
    """Run the imported graph on this one device: outputs and gradients are those of the module."""
    plan = autopar.plan(module, inputs, devices=1, cluster="local-cpu", optimizer="sgd")
    planned = autopar.parallelize(copy.deepcopy(module), plan, inputs)
    wanted = module(*inputs)
    actual = planned(*inputs)
    torch.testing.assert_close(actual, wanted)
    wanted.square().mean().backward()
    planned.loss(*inputs).backward()
    grads = dict(planned.named_parameters())
    for name, parameter in module.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            assert grads[name].grad is None or not grads[name].grad.any(), name
        else:
            torch.testing.assert_close(
                grads[name].grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


class Chained(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        before = y * 1
        y.add_(1.0).add_(before)
        y.relu_()
        return y + before


RELU = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))


@pytest.mark.parametrize("module", [Chained(), RELU], ids=["chain", "relu"])
def test_in_place_operators_become_plain_ones(module: nn.Module) -> None:
    model = import_torch(module, (x(),))
    assert not [kind for kind in kinds(model) if kind.split(".")[1].endswith("_")]
    assert "aten.relu.default" in kinds(model)
    compare_with_eager(module, x())


class WritesColumn(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y[:, 0] = 0
        return y


class WritesView(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.view(8).add_(1)
        return y


class ReadsView(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        flat = y.view(8)
        y.add_(1)
        return flat


@pytest.mark.parametrize(
    "module", [WritesColumn(), WritesView(), ReadsView()], ids=lambda m: type(m).__name__
)
def test_writing_where_a_view_is_read_later(module: nn.Module) -> None:
    """The graph is made functional, and computes what the module does."""
    assert not [
        kind for kind in kinds(import_torch(module, (x(),))) if kind.split(".")[1].endswith("_")
    ]
    compare_with_eager(module, x())


class Frozen(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.inner.weight.abs().mean()
            ones = torch.ones(4)
        return self.inner(x) * scale + ones


def test_no_grad_regions_are_inlined_and_pass_no_gradient() -> None:
    model = import_torch(Frozen(), (x(),))
    assert kinds(model).count("aten.detach.default") == 1 and "aten.abs.default" in kinds(model)
    assert not [kind for kind in kinds(model) if "grad_enabled" in kind]
    graph = load_model(Frozen(), ModelOptions(), (x(),)).graph
    abs_ = next(op for op in graph.operators if op.kind == "aten.abs.default")
    assert not tensors_with_gradient(graph, train=True).intersection(abs_.outputs)
    compare_with_eager(Frozen(), x())


class Squeezes(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).unsqueeze(1).squeeze()
        return y.squeeze(0).unsqueeze(-1).squeeze(-1).view_as(x)


def test_a_synchronized_batch_norm_is_read_as_a_plain_one() -> None:
    """Which runs on one GPU or more alone; the statistics of a plan are those of all samples."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    graphs = [import_torch(module, (x(),)).graph for module in (plain, synchronized)]
    assert graphs[0] == graphs[1]
    assert "forward" not in vars(synchronized[1])


def test_squeeze_names_the_dims_that_it_takes() -> None:
    model = import_torch(Squeezes(), (x(),))
    taken = [op.attributes["dim"] for op in model.graph.operators if op.kind == "aten.squeeze.dims"]
    assert taken == [(1,), (), (2,)] and not [
        k for k in kinds(model) if k in ("aten.squeeze.default", "aten.squeeze.dim")
    ]
    compare_with_eager(Squeezes(), x())


class Branch(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a: self.inner(a), lambda a: a * 2, (x,)) + 1  # type: ignore[no-any-return]


class DataDependent(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else x


class Selects(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[x.sum(-1) > 0]


class Counts(Block):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.inner(x) * self.seen


class ChangesView(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.view(1).add_(1)
        return self.inner(x)


class NormalisesTwice(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(self.inner(x)))  # type: ignore[no-any-return]


class ChangesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.add_(1))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Branch(), "'cond' is a cond region; control flow inside a model cannot be split"),
        (DataDependent(), "torch.export cannot capture DataDependent.*, test_importer.py:"),
        (Selects(), "has a size that depends on data"),
        (ChangesView(), "it changes 'seen' in the forward pass, which is no buffer of its own"),
        (ChangesInput(), "it changes 'x' in the forward pass"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_planned_is_refused_by_name(module: nn.Module, words: str) -> None:
    with pytest.raises(ModelError, match=words.replace("(", "\\(")):
        import_torch(module, (x(),))


def test_buffers_that_change_are_updates() -> None:
    """Each is read as it stands, and becomes what it was changed to last."""
    model = import_torch(Counts(), (x(),))
    ((buffer, value),) = model.graph.updates.items()
    assert (
        buffer == "seen"
        and value in next(op for op in model.graph.operators if op.kind == "aten.mul.Tensor").inputs
    )
    model = import_torch(NormalisesTwice(), (x(),))
    first, second = (op for op in model.graph.operators if "batch_norm" in op.kind)
    assert second.inputs[-2:] == first.outputs[3:]
    assert (
        model.graph.updates["norm.running_mean"] == second.outputs[3]
        and model.graph.updates["norm.running_var"] == second.outputs[4]
    )
    assert model.graph.tensors[model.graph.updates["norm.num_batches_tracked"]].dtype == "int64"


def test_batch_norm_in_eval_mode_is_read() -> None:
    model = import_torch(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (x(),))
    assert {"1.running_mean", "1.running_var"} <= set(model.buffers)
    assert all(model.graph.tensors[name].role is Role.CONSTANT for name in model.buffers)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))  # type: ignore[no-any-return]


def test_tied_weights_are_one_parameter_with_an_alias() -> None:
    model = import_torch(Tied(), (torch.zeros(2, 3, dtype=torch.int64),))
    assert [t.name for t in model.graph.parameters] == ["table.weight"]
    assert model.aliases == {"head.weight": "table.weight"}
    linear = next(op for op in model.graph.operators if op.kind == "aten.linear.default")
    assert linear.inputs[1] == "table.weight"


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, *, scale: Tensor, mask: Tensor | None = None, power: int = 1
    ) -> dict[str, Any]:
        y = self.inner(x) * scale**power
        return {"y": y if mask is None else y * mask, "power": power, "pair": (y.sum(), x)}


def test_keyword_inputs_and_structured_outputs() -> None:
    model = import_torch(Keywords(), (), {"x": x(), "scale": torch.ones(4), "power": 2})
    assert model.graph.inputs == ("x", "scale")
    assert {t.name: t.role for t in model.graph.tensors.values()}["scale"] is Role.INPUT
    assert (
        len(model.output_names) == 4
        and model.output_names[1] is None
        and model.output_names[-1] == "x"
    )
    assert model.out_spec.unflatten(list(range(4))) == {"y": 0, "power": 1, "pair": (2, 3)}


def test_frozen_parameters_are_not_trained() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    model = import_torch(module, (x(),))
    assert {t.name for t in model.graph.parameters if not t.trainable} == {"0.weight"}


def half_square(output: Tensor, x: Tensor) -> Tensor:
    return ((output - x) ** 2).sum() / 2


def no_scalar(output: Tensor, x: Tensor) -> Tensor:
    return output


def test_a_custom_loss_is_the_graphs_loss() -> None:
    module = nn.Linear(4, 4)
    loaded = load_model(module, ModelOptions(loss=half_square), (x(),))
    assert loaded.graph.loss is not None and loaded.graph.tensors[loaded.graph.loss].shape == ()
    assert "forward" not in vars(module) and loaded.loss is half_square
    plan = autopar.plan(module, (x(),), loss=half_square, devices=1, cluster="local-cpu")
    assert plan.model.loss == loaded.graph.loss
    inferred = load_model(module, ModelOptions(loss=half_square, train=False), (x(),))
    assert inferred.graph.loss is None and len(inferred.graph.operators) == 1


def test_a_loss_must_be_a_scalar() -> None:
    with pytest.raises(ModelError, match="loss function must return a scalar"):
        import_torch(nn.Linear(4, 4), (x(),), loss=no_scalar)


def test_without_a_loss_it_is_the_mean_square_of_the_trained_float_outputs() -> None:
    loaded = load_model(Keywords(), ModelOptions(), {"x": x(), "scale": torch.ones(4)})
    assert loaded.graph.loss is not None
    # The pair's first output is a scalar that depends on the weights: it is the model's own loss.
    assert loaded.graph.loss == loaded.source.outputs[1] and loaded.source.loss is None


def test_the_batch_is_rebound() -> None:
    graph = load_model(nn.Linear(4, 4), ModelOptions(batch=6), (x(),)).graph
    assert graph.tensors["input"].shape == (6, 4)
    with pytest.raises(UsageError, match="no batch dim"):
        load_model(nn.Linear(4, 4), ModelOptions(batch=6), (torch.ones(()),))


def test_another_dtype() -> None:
    graph = load_model(nn.Linear(4, 4), ModelOptions(dtype="bfloat16"), (x(),)).graph
    assert {t.dtype for t in graph.tensors.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("model", "inputs", "error", "words"),
    [
        ("nothing", None, UsageError, "is no model"),
        ("no.such.module:f", None, ModelError, "cannot be imported"),
        ("math:pi_is_not_here", None, ModelError, "cannot be imported"),
        ("platform:node", None, ModelError, "that returns"),
        ("gone.pt2", None, ModelError, "no such file"),
        (nn.Linear(4, 4), None, UsageError, "needs example inputs"),
        (3, None, UsageError, "not int"),
    ],
)
def test_what_is_no_model(model: Any, inputs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        load_model(model, ModelOptions(), inputs)
