"""Gradients as low-rank factors with error feedback: PowerSGD.

Vogels et al., arXiv:1905.13727, algorithms 1 and 2.

Instead of its matrix M_i, which includes the leftover of earlier steps, each rank sums two factors:

    M_i = G_i + E_i             P = orth(sum_i M_i Q)           Q' = sum_i M_i^T P
    sum_i G_i ~ P Q'^T          E_i = M_i - P (M_i^T P)^T

Q' is the start of the next step. With as many columns as M has rows or columns, P P^T M is M, so
the sum is exact. A tensor of more dims is a matrix of its first dim by the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

Summing = Generator[list[Tensor], list[Tensor], list[Tensor]]


def finished(making: Summing, sums: list[Tensor]) -> list[Tensor]:
    """Send the last sums, and return the result."""
    try:
        making.send(sums)
    except StopIteration as end:
        result: list[Tensor] = end.value
        return result
    raise AssertionError("two factors are summed, not more")


class LowRank:
    """The factors and leftovers of a chunk's parameters on this rank, by name.

    A copied module starts without them.
    """

    def __init__(self) -> None:
        self.factors: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}

    def forget(self, name: str) -> None:
        """Forget the factors and leftovers of a parameter."""
        self.factors.pop(name, None)
        self.left.pop(name, None)

    def summed(
        self, names: Sequence[str], gradients: Sequence[Tensor], ranks: Sequence[int]
    ) -> Summing:
        """Yield factors to sum over the ranks, twice, and return the sums of the gradients."""
        matrices = list(map(self._matrix, names, gradients))
        starts = map(self._start, names, matrices, ranks)
        # P, not yet orthogonal: all ranks orthogonalise the same sum, and so get the same basis.
        lefts = yield [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
        bases = [torch.linalg.qr(left)[0] for left in lefts]
        own = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        # The leftover is what this rank's own share loses, before the sum over the ranks.
        for name, matrix, basis, right in zip(names, matrices, bases, own, strict=True):
            self.left[name] = matrix - basis @ right.T
        rights = yield own
        results = []
        for name, gradient, basis, right in zip(names, gradients, bases, rights, strict=True):
            # The sum is a view of the message, which would stay alive with it.
            self.factors[name] = right.clone()
            results.append((basis @ right.T).reshape(gradient.shape))
        return results

    def _matrix(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.reshape(gradient.shape[0], -1)
        before = self.left.get(name)
        return matrix if before is None else matrix + before.to(matrix)

    def _start(self, name: str, matrix: Tensor, rank: int) -> Tensor:
        """The start of the iteration: the step before's factor, or numbers equal on all ranks."""
        factor = self.factors.get(name)
        if factor is not None and factor.shape == (matrix.shape[1], rank):
            return factor.to(matrix)
        # Seeded by the name, so that no rank needs to tell the others.
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        shape = (matrix.shape[1], rank)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix)
