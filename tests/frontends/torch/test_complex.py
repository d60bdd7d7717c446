"""Complex numbers in a model's code are constants of its graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.ir import Role
from autopar.runtime.import_proof import prove_import


class _Rotates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned = x * torch.exp(1j * self.angle) / (2 - 1j) + 3j
        return self.inner(turned.real) + turned.imag  # type: ignore[no-any-return]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_numbers_have_the_type_of_their_results(layers: int, dtype: torch.dtype) -> None:
    module = nn.Sequential(*[_Rotates() for _ in range(layers)]).to(dtype)
    model = load_model(module, ModelOptions(), (torch.randn(4, 4, dtype=dtype),))
    constants = [t for t in model.source.tensors.values() if t.role is Role.CONSTANT]
    wanted = {torch.float32: "complex64", torch.float64: "complex128"}[dtype]
    assert {tensor.dtype for tensor in constants} == {wanted}
    assert len(constants) == 3 * layers
    assert prove_import(model).proved
