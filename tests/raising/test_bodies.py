"""Trees of pointwise operators are one operator where less is kept, with gradients of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.frontends.torch import import_torch
from autopar.ir import Operator, Ref
from autopar.ir.bodies import POINTWISE
from autopar.raising import raised
from autopar.raising.bodies import KEEPS_INPUTS, KEEPS_NOTHING, KEEPS_RESULT, MOST
from autopar.runtime.local_forms.bodies import compiled, pointwise
from autopar.sharding.rules import RULES, Call
from autopar.sharding.rules.saved_for_backward import keeps
from tests.frontends.torch.test_importer import compare_with_eager
from tests.runtime.helpers import GraphBuilder

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
Two = Callable[[Tensor, Tensor], Tensor]


class Both(nn.Module):
    """A function of two products, followed by another product."""

    def __init__(self, function: Two) -> None:
        super().__init__()
        self.function = function
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(6, 8)
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        """The last product."""
        return self.last(self.function(self.left(x), self.right(x)))


def _bodies(module: nn.Module) -> list[Operator]:
    graph = import_torch(module, (X,)).graph
    return [operator for operator in graph.operators if operator.kind == POINTWISE]


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    """As gpt-oss has it."""
    return (up.clamp(-2, 2) + 1) * (gate * torch.sigmoid(1.702 * gate))


@pytest.mark.parametrize(
    "function",
    [
        lambda gate, up: functional.silu(gate) * up,
        lambda gate, up: up * functional.gelu(gate, approximate="tanh"),
        lambda gate, up: functional.relu(gate).square() * up,
        lambda gate, up: functional.silu(gate.double()).float() * up,
        lambda gate, up: (torch.exp(-functional.softplus(gate + 1)) * up) / (1 + up * up),
        _clamped,
    ],
)
def test_a_gate_keeps_its_inputs_alone(function: Two) -> None:
    module = Both(function)
    assert _bodies(module)
    compare_with_eager(module, X)


@pytest.mark.parametrize(
    "function",
    [
        # What autograd keeps of these is no more than their inputs.
        lambda gate, up: gate + up * 2,
        lambda gate, up: torch.tanh(gate / 3) * 3 + up,
        lambda gate, up: torch.sigmoid(gate) * up,
        # A value that is read twice would be made twice.
        lambda gate, up: (made := functional.silu(gate)) * up + made.sum(),
    ],
)
def test_a_tree_that_keeps_no_less_is_not_made(function: Two) -> None:
    assert not _bodies(Both(function))


@pytest.mark.parametrize(
    "spelled",
    [
        lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865475)),
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        lambda x: x * torch.sigmoid(x),
    ],
)
def test_activations_that_are_spelled_out(spelled: Callable[[Tensor], Tensor]) -> None:
    module = Both(lambda left, right: spelled(left) + right)
    kinds = {operator.kind for operator in import_torch(module, (X,)).graph.operators}
    assert kinds & {"aten.gelu.default", "aten.silu.default"}
    assert not kinds & {"aten.erf.default", "aten.tanh.default", "aten.sigmoid.default"}
    compare_with_eager(module, X)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: 0.6 * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: 0.5 * x * (2 + torch.erf(x / 2**0.5)),
        lambda x: 0.5 * x * (1 + torch.erf(x / 2)),
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.05 * x**3))),
        lambda x: x * torch.sigmoid(1.702 * x),
        # A constant with a dim more gives the result one more.
        lambda x: (x * torch.full((1, 1, 1), 0.5) * (1 + torch.erf(x / 2**0.5))).squeeze(0),
    ],
)
def test_other_constants_are_no_activation(other: Callable[[Tensor], Tensor]) -> None:
    module = Both(lambda left, right: other(left) + right)
    kinds = {operator.kind for operator in import_torch(module, (X,)).graph.operators}
    assert not kinds & {"aten.gelu.default", "aten.silu.default"}
    compare_with_eager(module, X)


def test_words_keep_what_autograd_keeps() -> None:
    for words, kept in (
        (KEEPS_INPUTS, (True, False)),
        (KEEPS_RESULT, (False, True)),
        (KEEPS_NOTHING, (False, False)),
    ):
        for word in words:
            for kind in RULES:
                if kind.split(".")[:2] != ["aten", word] or "mode" in kind:
                    continue
                b = GraphBuilder()
                given = {"self": b.input("x", 4)}
                if word in ("mul", "div") and kind.endswith("Tensor"):
                    given["other"] = b.input("y", 4)
                b.one(kind, (4,), **given)
                operator = b.operators[0]
                call = Call.of(b.finish("", [operator.outputs[0]]), operator)
                saved = keeps(call, (True,) * len(call.inputs))
                if word in ("mul", "div") and len(given) == 1:
                    continue
                assert (bool(saved.inputs), bool(saved.outputs)) == kept, kind


def _gate() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    made = (torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    return tuple(tensor.requires_grad_() for tensor in made)


def _body(left: Tensor | Ref, right: Tensor | Ref) -> tuple[object, ...]:
    gate = ("aten.silu.default", (("self", left),))
    return "aten.mul.Tensor", (("self", gate), ("other", right))


def test_first_and_second_derivatives() -> None:
    def run(left: Tensor, right: Tensor) -> Tensor:
        return pointwise(_body(left, right))

    assert torch.autograd.gradcheck(run, _gate())
    assert torch.autograd.gradgradcheck(run, _gate())
    left, right = _gate()
    # The product is kept nowhere.
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        run(left, right)
    assert [id(tensor) for tensor in held] == [id(left), id(right)]


@pytest.mark.slow
@pytest.mark.ci
def test_the_compiled_form() -> None:
    left, right = _gate()
    made = compiled(_body(Ref(0), Ref(1)))(left, right)  # type: ignore[arg-type]
    wanted = functional.silu(left) * right
    torch.testing.assert_close(made, wanted)
    gradients = torch.autograd.grad(made.square().sum(), (left, right))
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.square().sum(), (left, right)))


def test_trees_of_long_chains_are_cut() -> None:
    b = GraphBuilder()
    x = b.one("aten.mul.Tensor", (4,), self=b.input("x", 4), other=b.parameter("w", 4))
    for _ in range(3000):
        x = b.one("aten.silu.default", (4,), self=x)
    graph = raised(b.finish("chain", [x]))
    assert len(graph.operators) < 3000 / MOST + 3
