"""Stand-ins by themselves: which operators they take, answer and refuse."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.runtime.stand_ins import Elsewhere, Figures, Origin, StandIn, pass_over_stand_ins

pass_over_stand_ins()


class _Holders:
    """Stages of which this rank is the first."""

    device = torch.device("cpu")

    def wrap(self, value: Tensor) -> Tensor:
        return value

    def all_lack_one(self, missing: Sequence[Elsewhere], present: Sequence[Tensor]) -> bool:
        return bool(present)

    def exchanged(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [torch.ones(v.shape) if isinstance(v, Elsewhere) else v for v in values]

    def read_gradients(self, outputs: Any, inputs: Sequence[Tensor], **options: Any) -> Any:
        raise NotImplementedError


def _stand_in(values: Tensor | None = None) -> StandIn:
    """A gradient of other ranks, with figures of these values; without any a weight."""
    origin = Origin(name="there", holders=_Holders(), stages=frozenset({1}))
    figures = Figures()
    if values is not None:
        norms = [values.norm().double(), values.abs().max().double()]
        figures = Figures(torch.stack(norms), told=True)
    return StandIn.of(torch.empty(2, 3, device="meta"), origin, figures)


VALUES = torch.tensor([[3.0, -4.0, 0.0], [1.0, 2.0, -7.0]])

ANSWERED: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of data": lambda g: g.data.norm(2),
    "largest": lambda g: g.norm(math.inf),
    "largest element": lambda g: g.detach().abs().max(),
    "amax": lambda g: g.abs().amax(),
    "linalg": lambda g: torch.linalg.vector_norm(g, 2.0),
    "torch.norm": lambda g: torch.norm(g, p=2),
    "in another type": lambda g: g.double().norm(),
    "kept dims": lambda g: torch.linalg.vector_norm(g, 2, keepdim=True),
    "of a view": lambda g: g.view(-1).norm(),
    "of a transpose": lambda g: g.T.norm(),
    "sum of squares": lambda g: g.square().sum(),
    "sum of powers": lambda g: (g**2).sum(),
    "sum of products": lambda g: (g * g).sum(),
    "finite": lambda g: torch.isfinite(g).all(),
    "not a number": lambda g: g.isnan().any(),
    "of a multiple": lambda g: (g * -0.5).norm(),
    "of a part of one": lambda g: (g / 4).norm(),
    "of a number times it": lambda g: (torch.tensor(-2.0) * g).norm(math.inf),
    "scaled in place": lambda g: g.mul_(-3).norm(),
    "scaled by way of data": lambda g: (g.data.mul_(0.5), g.norm())[1],
    "scaled by way of a view": lambda g: (g.view(-1).div_(2.0), g.norm())[1],
    "scaled by a tensor": lambda g: g.mul_(torch.tensor(0.25)).norm(),
    "zeroed": lambda g: g.zero_().norm(),
    "copied": lambda g: torch.empty_like(g).copy_(g).norm(),
    "a copy of its own": lambda g: (g.clone().mul_(2), g.norm())[1],
    "list of norms": lambda g: torch._foreach_norm([g], 2.0)[0],
    "list of largest elements": lambda g: torch._foreach_norm([g], math.inf)[0],
    "list scaled": lambda g: (torch._foreach_mul_([g], torch.tensor(0.5)), g.norm())[1],
    "list scaled by numbers": lambda g: (torch._foreach_mul_([g], [0.5]), g.norm())[1],
    "list divided": lambda g: (torch._foreach_div_([g], 2.0), g.norm())[1],
    "list zeroed": lambda g: (torch._foreach_zero_([g]), g.norm())[1],
    "copied deeply": lambda g: copy.deepcopy(g).norm(),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_figures_of_gradients_are_those_of_their_values(name: str) -> None:
    for values in (VALUES, VALUES.clone().fill_(math.nan)):
        actual = ANSWERED[name](_stand_in(values))
        assert type(actual) is Tensor
        torch.testing.assert_close(actual, ANSWERED[name](values.clone()), equal_nan=True)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "sign": lambda g: g.sign_(),
    "clamped": lambda g: g.clamp_(-1, 1),
    "added": lambda g: g.add_(1),
    "divided by 0": lambda g: g.div_(0),
    "a row": lambda g: g[0].zero_(),
    "a row set": lambda g: g.__setitem__(0, 0.0),
    "a row of its data": lambda g: g.data[0].mul_(0.5),
    "by a mask": lambda g: g.mul_(torch.ones(2, 3)),
    "in a list": lambda g: torch._foreach_clamp_max_([g], 1.0),
    "in a list, by a tensor each": lambda g: torch._foreach_add_([g], [torch.ones(2, 3)]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_changed_in_another_way_has_no_figures(name: str) -> None:
    gradient = _stand_in(VALUES)
    CHANGES[name](gradient)
    assert gradient.figures.values is None
    norm = gradient.norm()
    assert isinstance(norm, Elsewhere)
    with pytest.raises(PlanError, match=r"'there' is a parameter of another.*clip_grad_norm_"):
        norm.item()
    # Others may have been told this norm, and do not wait to be asked for it.
    with pytest.raises(PlanError, match="stack"):
        torch.stack([norm, torch.ones(())])


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda p: p.sum().item(),
    "float": lambda p: float(p.norm()),
    "bool": lambda p: bool((p > 0).all()),
    "list": lambda p: p.tolist(),
    "array": lambda p: p.detach().numpy(),
    "equal": lambda p: torch.equal(p, torch.ones(2, 3)),
    "close": lambda p: torch.allclose(p, torch.ones(2, 3)),
    "nonzero": lambda p: p.nonzero(),
    "a sum": lambda p: torch.ones(()) + p.sum(),
    "a sum, in place": lambda p: torch.ones(()).add_(p.sum()),
    "into another": lambda p: torch.ones(2, 3).copy_(p),
    "beside what has a gradient": lambda p: p * torch.ones(2, 3, requires_grad=True),
    "scaling another": lambda p: torch.ones(2, 3).mul_(p.norm()),
    "a list scaling": lambda p: torch._foreach_mul_([torch.ones(2)], p.norm()),
    "a list copied": lambda p: torch._foreach_copy_([torch.ones(2, 3)], [p]),
    "whole": lambda p: p.full_tensor(),  # type: ignore[operator]
    "a file": lambda p: torch.save(p, io.BytesIO()),
    "a backward pass": lambda p: p.sum().backward(),
    "a gradient of it": lambda p: torch.autograd.grad(p.sum(), p),
    "a stack of values on no rank": lambda p: torch.stack([p * torch.ones(2, 3), torch.ones(2, 3)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_values_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="'there' is a parameter of another pipeline stage"):
        REFUSED[name](nn.Parameter(_stand_in()))


MADE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "mean of rows": lambda p: p - p.mean(1, keepdim=True),
    "mask": lambda p: (p > 0).to(torch.float64),
    "product": lambda p: p @ p.T,
    "with a whole tensor": lambda p: torch.ones(2, 3) + p,
    "zeros": torch.zeros_like,
    "moment": lambda p: torch.zeros_like(p).lerp_(p, 0.5),
    "one by one": lambda p: torch.stack([p.norm(1), p.norm(1)]),
    "list": lambda p: torch._foreach_add([p, p], [p, p])[1],
    "in half": lambda p: p.to(torch.bfloat16),
    "old constructor": lambda p: p.new(6).zero_(),
}


@pytest.mark.parametrize("name", MADE)
def test_operators_give_stand_ins_of_true_shape(name: str) -> None:
    with torch.no_grad():
        made = MADE[name](nn.Parameter(_stand_in()))
        like = MADE[name](nn.Parameter(VALUES.clone()))
    assert isinstance(made, Elsewhere)
    assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)


def test_a_parameter_is_changed_as_torch_allows() -> None:
    parameter = nn.Parameter(_stand_in())
    assert isinstance(parameter, nn.Parameter) and parameter.numel() == 6
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter.mul_(2)
    with torch.no_grad():
        assert parameter.mul_(2).add_(torch.ones(2, 3)) is parameter
        parameter.copy_(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"shape|size"), torch.no_grad():
        parameter.add_(torch.ones(4, 5))
    parameter.data = torch.ones(2, 3, dtype=torch.float64)
    assert isinstance(parameter.data, Elsewhere) and parameter.dtype == torch.float64
    assert "there" in repr(parameter)


def test_random_numbers_are_drawn_as_by_the_holder() -> None:
    """Generators of all ranks go on alike, so that batches drawn later are the same."""
    states = []
    for value in (torch.zeros(2, 3), _stand_in()):
        torch.manual_seed(3)
        nn.init.normal_(value)
        nn.init.kaiming_uniform_(value)
        states.append(torch.rand(3))
    assert torch.equal(*states)


def test_values_that_ranks_tell_one_another_are_joined() -> None:
    """Each rank lacks one, so that all take part; no gradient leads back."""
    here = torch.full((2, 3), 5.0)
    assert torch.equal(torch.cat([here, _stand_in()]), torch.cat([here, torch.ones(2, 3)]))
    norms = torch.stack([here.norm(1), _stand_in(VALUES).norm(1)])
    assert torch.equal(norms, torch.tensor([30.0, 1.0]))
    joined = torch.cat([here, nn.Parameter(_stand_in())])
    with pytest.raises(PlanError, match="no gradient"):
        joined.norm().backward()  # type: ignore[no-untyped-call]


def test_optimizers_pass_over_stand_ins() -> None:
    """They make no state for them, and read no numbers of them; gradients are there afterwards."""
    here = nn.Parameter(torch.ones(2, 3))
    there = nn.Parameter(_stand_in())
    for kind in (torch.optim.Adafactor, torch.optim.AdamW):
        optimizer = kind([there, here], lr=0.1)

        def closure() -> Tensor:
            gradient = _stand_in(VALUES)
            here.grad = torch.ones(2, 3)
            there.grad = gradient
            assert optimizer.param_groups[0]["params"][0].grad is gradient  # noqa: B023
            return torch.zeros(())

        closure()
        optimizer.step()
        assert there.grad is not None and torch.equal(there.grad.norm(), VALUES.norm())
        there.grad = None
        optimizer.step(closure)
        assert isinstance(there.grad, Elsewhere)
        assert set(optimizer.state) == {here}
        torch.save(optimizer.state_dict(), io.BytesIO())


def test_a_gradient_scaler_divides_figures_and_sees_those_that_are_not_finite() -> None:
    here = torch.full((2,), 8.0)
    for values, bad in ((VALUES, 0.0), (VALUES * math.inf, 1.0)):
        there = _stand_in(values)
        told = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([there, here], told, torch.tensor(0.5))
        assert told.item() == bad
        torch.testing.assert_close(there.norm(), (values * 0.5).norm(), equal_nan=True)
    assert torch.equal(here, torch.full((2,), 2.0))
    with pytest.raises(PlanError, match="changed gradients"):
        torch._amp_foreach_non_finite_check_and_unscale_(
            [_stand_in(VALUES).sign_()], torch.zeros(()), torch.tensor(0.5)
        )


def test_lists_run_on_the_tensors_that_are_here() -> None:
    here = [torch.ones(3), torch.full((2, 3), 2.0)]
    there = nn.Parameter(_stand_in())
    mixed = [here[0], there, here[1]]
    with torch.no_grad():
        torch._foreach_addcdiv_(mixed, mixed, mixed, [1.0, 2.0, 3.0])
        assert torch.equal(here[0], torch.full((3,), 2.0))
        assert torch.equal(here[1], torch.full((2, 3), 5.0))
        sums = torch._foreach_add(mixed, [torch.ones(3), torch.ones(2, 3), torch.ones(2, 3)])
        assert [type(value) for value in sums] == [Tensor, StandIn, Tensor]
        torch._fused_sgd_(
            mixed,
            [torch.ones(3), _stand_in(VALUES), torch.ones(2, 3)],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
    assert torch.equal(here[0], torch.ones(3))
