"""Dropout by torch's own generator draws in the order of the input's memory, as torch does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from autopar.runtime.local_forms.dropout import exact_dropout


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_a_transposed_input_has_the_mask_of_one_device(dims: tuple[int, ...]) -> None:
    x = torch.rand(4, 6, 5, dtype=torch.float64).add(1).permute(dims)
    torch.manual_seed(3)
    wanted = functional.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(exact_dropout(x, 0.5, x.shape, []), wanted)
