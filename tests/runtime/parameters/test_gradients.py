"""Gradients that lie alone in their memory, to which others may be added in place."""

import torch

from autopar.runtime.parameters.gradients import Gradients, in_own_memory


def test_what_autograd_makes_anew_is_alone() -> None:
    x = torch.randn(4, 3)
    weight = torch.randn(2, 3, requires_grad=True)
    bias = torch.randn(2, requires_grad=True)
    table = torch.randn(5, 2, requires_grad=True)
    loss = (torch.nn.functional.linear(x, weight, bias) + table[:4]).square().sum()
    results = torch.autograd.grad(loss, [weight, bias, table])
    assert in_own_memory(results, [x]) == [True, True, True]


def test_what_others_hold_or_overlaps_is_not() -> None:
    start = torch.ones(4)
    first, second, single, scalar = (torch.randn(4, requires_grad=True) for _ in range(4))
    sums = [first + second, single + 0.0, scalar.sum()]
    upstream = [torch.ones(4), start, torch.ones(())]
    results = torch.autograd.grad(sums, [first, second, single, scalar], upstream)
    assert results[0] is results[1], "autograd gives one tensor to both"
    assert results[2] is start, "autograd gives what it was given"
    assert results[3].stride() == (0,), "autograd gives an expanded number"
    # The first start has no other reader but the list in which it was handed over.
    assert in_own_memory(results, upstream) == [False] * 4
    whole = torch.randn(4, 4)
    parts = torch.split(whole, 2)
    assert in_own_memory([*parts, None], []) == [False, False, False]
    del whole
    saved = torch.randn(4, requires_grad=True)
    squared = saved.exp()
    assert in_own_memory([squared.detach()], []) == [False], "the graph has saved it"


def test_only_gradients_of_their_own_are_added_to_in_place() -> None:
    place = ("w", ())
    more = torch.ones(3)
    for own in (True, False):
        gradients = Gradients()
        first = torch.zeros(3)
        gradients.add(place, first, own=own)
        gradients.add(place, more)
        assert gradients.at[place].tolist() == [1.0] * 3
        assert (gradients.at[place] is first) == own
    gradients = Gradients()
    gradients.add(place, more)
    gradients.add(place, torch.ones(3), own=True)
    gradients.add(place, torch.ones(3))
    assert more.tolist() == [1.0] * 3 and gradients.at[place].tolist() == [3.0] * 3
