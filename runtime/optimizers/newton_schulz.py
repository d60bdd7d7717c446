"""Newton-Schulz iteration: a matrix with all singular values brought near 1, by products alone.

    X = G / |G|
    X = a X + (b A + c A A) X,  A = X X^T              five times, for m <= n

in bfloat16. a, b and c are those that raise small singular values most (K. Jordan,
https://kellerjordan.github.io/posts/muon), as `torch.optim.Muon` has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.order.owners import STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def newton_schulz(matrix: Tensor) -> Tensor:
    """The iteration's result for a matrix [m, n], in bfloat16."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    value = matrix.to(torch.bfloat16)
    # The product with its own transpose is then of the shorter side.
    value = value.T if tall else value
    # The iteration needs singular values of 1 at the most.
    value = value / value.norm().clamp(min=EPS)
    for _ in range(STEPS):
        outer = value @ value.T
        factor = torch.addmm(outer, outer, outer, beta=b, alpha=c)
        value = torch.addmm(value, factor, value, beta=a)
    return value.T if tall else value
