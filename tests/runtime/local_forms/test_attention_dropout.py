"""Attention with dropout in blocks equals the one written out with the same mask: values and
gradients, in every form it takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.local_forms import blockwise_attention
from autopar.runtime.local_forms.attention_dropout import attention
from autopar.runtime.local_forms.randomness import is_random
from autopar.runtime.random_numbers.counter_bits import Region
from autopar.runtime.random_numbers.distributions import Source
from autopar.runtime.random_numbers.draw_state import Draws, drawing
from autopar.runtime.ranks.cuts import Cut, shard_of

RATE = 0.3
DRAWS = Draws(seed=4, step=2)
OPERATOR = 11


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def _given(
    batch: tuple[int, ...],
    heads: int,
    shared: int,
    rows: int,
    keys: int,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    shapes = ((*batch, heads, rows, 8), (*batch, shared, keys, 8), (*batch, shared, keys, 6))
    return [_normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shape: tuple[int, ...],
    **how: Any,
) -> Tensor:
    if key.dim() > 2 and query.shape[-3] != key.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * how.get("scale", query.shape[-1] ** -0.5)
    if how.get("is_causal"):
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf
        )
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    stays = Source(DRAWS, OPERATOR, Region.of(shape, ())).chosen(1 - RATE)
    return (torch.softmax(scores, -1) * stays / (1 - RATE)) @ value


def _results(function: Any, values: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in values]
    out = function(*leaves)
    out.backward(_normal(*out.shape, seed=9, dtype=out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


MASKS = {
    "bool": torch.rand(12, 10, generator=torch.Generator().manual_seed(0)) > 0.4,
    "bool of keys": torch.arange(10) < torch.tensor([7, 10])[:, None, None, None],
    "added": _normal(2, 4, 12, 10, seed=5),
    "added to all heads": _normal(2, 1, 12, 10, seed=5),
    "added to all batches": _normal(4, 1, 10, seed=5),
}
CASES: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "plain": (_given((2,), 4, 4, 12, 10), {}),
    "causal": (_given((2,), 4, 4, 12, 10), {"is_causal": True}),
    "more keys than rows, causal": (_given((2,), 4, 4, 5, 12), {"is_causal": True}),
    "grouped": (_given((2,), 4, 2, 12, 10), {"enable_gqa": True}),
    "grouped, causal, scaled": (
        _given((2,), 6, 2, 12, 12),
        {"enable_gqa": True, "is_causal": True, "scale": 0.2},
    ),
    "double": (_given((2,), 4, 4, 12, 10, torch.float64), {}),
    "three dims": (_given((), 4, 4, 12, 10), {}),
    "two dims": ([x[0] for x in _given((), 1, 1, 12, 10)], {"is_causal": True}),
    "five dims": (_given((2, 3), 4, 2, 12, 10), {"enable_gqa": True}),
    "one row": (_given((2,), 4, 4, 1, 10), {}),
    **{f"mask: {name}": ([*_given((2,), 4, 4, 12, 10), mask], {}) for name, mask in MASKS.items()},
    "mask of a group": ([*_given((2,), 4, 2, 12, 10), MASKS["added"]], {"enable_gqa": True}),
    "mask of five dims": ([*_given((2, 3), 4, 4, 12, 10), _normal(3, 1, 12, 10, seed=5)], {}),
}


@pytest.mark.parametrize("most", [1, 50, 700, 2**20])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_one_written_out(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_attention, "SCORES_AT_ONCE", most)
    values, how = CASES[name]
    shape = (*values[0].shape[:-1], values[1].shape[-2])

    def ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        with drawing(DRAWS):
            return attention(query, key, value, shape, (), OPERATOR, RATE, attn_mask=mask, **how)

    def theirs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return _written_out(query, key, value, mask, shape, **how)

    for actual, wanted in zip(_results(ours, values), _results(theirs, values), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """As close to the one in double as the type allows."""
    values = _given((2,), 4, 2, 12, 10, dtype)
    with drawing(DRAWS):
        actual = _results(
            lambda *x: attention(*x, (2, 4, 12, 10), (), OPERATOR, RATE, enable_gqa=True), values
        )
    wanted = _results(
        lambda *x: _written_out(*x, None, (2, 4, 12, 10)), [x.double() for x in values]
    )
    for one, other in zip(actual, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.double(), other, rtol=0, atol=4 * torch.finfo(dtype).eps * float(other.abs().max())
        )


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    values = _given((2,), 4, 4, 12, 10)
    mask = torch.ones(12, 10, dtype=torch.bool)
    mask[3] = False
    with drawing(DRAWS):
        results = _results(
            lambda *x: attention(*x, (2, 4, 12, 10), (), OPERATOR, RATE, attn_mask=mask), values
        )
    assert not results[0][:, :, 3].any() and all(bool(x.isfinite().all()) for x in results)
    assert not results[1][:, :, 3].any()


def test_what_drops_everything_gives_zeros() -> None:
    with drawing(DRAWS):
        results = _results(
            lambda *x: attention(*x, (2, 4, 12, 10), (), OPERATOR, 1.0), _given((2,), 4, 4, 12, 10)
        )
    assert len(results) == 4 and not any(value.any() for value in results)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_shards_of_batch_heads_and_rows(dims: tuple[int, ...]) -> None:
    values = _given((4,), 4, 4, 12, 10)
    with drawing(DRAWS):
        whole = attention(*values, (4, 4, 12, 10), (), OPERATOR, RATE)
        for at in range(2):
            cuts = [Cut(dim, 2 if dim == 0 else 1, 2, at) for dim in dims]
            inner = [cut for cut in cuts if cut.dim < 2]
            shards = shard_of(values[0], cuts), *(shard_of(x, inner) for x in values[1:])
            result = attention(*shards, (4, 4, 12, 10), cuts, OPERATOR, RATE)
            torch.testing.assert_close(result, shard_of(whole, cuts), rtol=1e-5, atol=1e-6)


def test_the_scores_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that forward or backward makes is as large as the scores."""
    monkeypatch.setattr(blockwise_attention, "SCORES_AT_ONCE", 2**12)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max(
                [
                    largest,
                    *(
                        x.numel()
                        for x in (out if isinstance(out, tuple) else (out,))
                        if isinstance(x, Tensor)
                    ),
                ]
            )
            return out

    values = _given((2,), 4, 4, 128, 128)
    with drawing(DRAWS), Largest():
        _results(
            lambda *x: attention(*x, (2, 4, 128, 128), (), OPERATOR, RATE, is_causal=True), values
        )
    assert largest <= 2**16 < 2 * 4 * 128 * 128


class _Attending(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, self.out(x), dropout_p=self.rate)


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_attention_draws_only_where_it_drops(rate: float) -> None:
    """So nobody is asked for a number in every step, and a check of stages takes the original
    model.
    """
    model = load_model(_Attending(rate), ModelOptions(train=True), (torch.zeros(2, 2, 4, 8),))
    assert is_random(model.graph) == (rate > 0)
