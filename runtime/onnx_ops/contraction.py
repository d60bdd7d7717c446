"""Matrix products and other contractions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor


def matmul(*, A: Tensor, B: Tensor) -> Tensor:
    """The matrix product, batched and broadcast as numpy does."""
    return torch.matmul(A, B)


def gemm(
    *,
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """The product alpha A' B' + beta C, where A' and B' are A and B, transposed if so asked."""
    product = torch.matmul(A.mT if transA else A, B.mT if transB else B)
    # A factor of one costs a pass over the product: skipped, since it is the default.
    if alpha != 1.0:
        product = product * alpha
    if C is None:
        return product
    return product + (C if beta == 1.0 else C * beta)


def einsum(*, Inputs: tuple[Tensor, ...], equation: str) -> Tensor:
    """The contraction that the equation spells."""
    return torch.einsum(equation, *Inputs)


def determinant(*, X: Tensor) -> Tensor:
    """The determinant of the innermost square matrices."""
    result: Tensor = torch.linalg.det(X)
    return result


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "MatMul": matmul,
    "Gemm": gemm,
    "Einsum": einsum,
    "Det": determinant,
}
