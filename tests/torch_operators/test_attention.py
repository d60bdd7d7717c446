"""Attention with sinks and windows equals its textbook form, with its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar.torch_operators import attention_blocks

LENGTH = 12
MASKS = ("none", "hides", "added")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool, int]


def written(given: Given, cap: float = 0.0) -> Tensor:
    """The products and the softmax, with a column for sinks."""
    query, key, value, sinks, mask, causal, window = given
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = cap * (scores / cap).tanh() if cap else scores
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    behind = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    if causal:
        scores = scores.masked_fill((behind < 0) | (window > 0) & (behind >= window), -math.inf)
    column = torch.full((query.shape[1],), -math.inf) if sinks is None else sinks
    column = column.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value


def computed(*given: object) -> Tensor:
    made: Tensor = torch.ops.autopar.attention(*given)
    return made


def masks(name: str) -> Tensor | None:
    if name == "none":
        return None
    if name == "added":
        return drawn(2, 1, LENGTH, LENGTH)
    return (torch.rand(LENGTH, LENGTH) > 0.4) | torch.eye(LENGTH, dtype=torch.bool)


@pytest.mark.parametrize(("sunk", "cap"), [(True, 0.0), (False, 0.0), (False, 0.7), (True, 2.0)])
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 3), (True, 7)])
@pytest.mark.parametrize("sizes", [(4, 4), (2, 4), (2, 6)])
def test_results_and_gradients(
    sunk: bool,
    cap: float,
    causal: bool,
    window: int,
    sizes: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    groups, width = sizes
    monkeypatch.setattr(attention_blocks, "CAUSAL_ROWS", 3)
    q = drawn(2, 4, LENGTH, 4)
    k = drawn(2, groups, LENGTH, 4)
    v = drawn(2, groups, LENGTH, width)
    sinks = drawn(4) if sunk else None
    for name in MASKS:
        given = (q, k, v, sinks, masks(name), causal, window)
        one = computed(*given, None, cap)
        other = written(given, cap)
        torch.testing.assert_close(one, other)
        leaves = [x for x in given[:5] if isinstance(x, Tensor) and x.requires_grad]
        gradient = torch.randn_like(one)
        made, wanted = (torch.autograd.grad(x, leaves, gradient) for x in (one, other))
        torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("window", [0, 2])
def test_gradients_by_differences(window: int) -> None:
    torch.manual_seed(0)
    given = (drawn(1, 2, 5, 3), drawn(1, 1, 5, 3), drawn(1, 1, 5, 3), drawn(2))

    def attended(*tensors: Tensor) -> Tensor:
        return computed(*tensors, None, True, window)

    assert torch.autograd.gradcheck(attended, given)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.gradgradcheck(attended, given)


@pytest.mark.parametrize(
    ("window", "cap", "as_gpus"), [(0, 0, 0), (4, 0, 0), (4, 1.5, 1), (0, 2, 1)]
)
def test_half_precision_and_rows_that_are_no_rows_in_memory(
    window: int, cap: float, as_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if as_gpus:
        monkeypatch.setattr(attention_blocks, "_operand", lambda x: x)
    narrow = [drawn(2, h, 8, LENGTH, dtype=torch.bfloat16).mT for h in (4, 2, 2)]
    given = (*narrow, drawn(4, dtype=torch.float32))
    wide = [x.double() for x in given]
    one = computed(*given, None, True, window, None, cap)
    other = written((wide[0], wide[1], wide[2], wide[3], None, True, window), cap)
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one.double(), other, atol=0.02, rtol=0.02)
    made, wanted = (torch.autograd.grad(x.sum(), given) for x in (one, other))
    torch.testing.assert_close(made, wanted, atol=0.05, rtol=0.05, check_dtype=False)


def test_a_window_must_be_causal_and_square() -> None:
    q = drawn(1, 1, 4, 2)
    k = drawn(1, 1, 6, 2)
    for given in ((q, q, q, None, None, False, 2), (q, k, k, None, None, True, 2)):
        with pytest.raises(ValueError, match="window"):
            computed(*given)


@pytest.mark.parametrize(("sunk", "window"), [(True, 0), (True, 4), (False, 4)])
def test_the_operator_can_be_traced(sunk: bool, window: int) -> None:
    tensors = [drawn(1, 4, 8, 4, dtype=torch.float32) for _ in range(3)]
    sinks = drawn(4, dtype=torch.float32) if sunk else None
    kind = torch.ops.autopar.attention_forward.default
    made = torch.library.opcheck(kind, (*tensors, sinks, None, 0.5, True, window, 0.0))
    assert set(made.values()) == {"SUCCESS"}
