"""Rotary positions as one operator, which keeps its angles only.

    y = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)

x1 and x2 are the halves of the last dim (Su et al., RoFormer, 2021). Each half is written where it
belongs: half of the traffic of products, a join and a sum. The gradient of x is a rotation, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .defining import LIBRARY


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., w] turned by angles whose `cos` and `sin` broadcast to it."""
    first, second = x.chunk(2, -1)
    made = torch.empty_like(x)
    left, right = made.chunk(2, -1)
    cos1, cos2 = cos.chunk(2, -1)
    sin1, sin2 = sin.chunk(2, -1)
    torch.mul(first, cos1, out=left).addcmul_(second, sin1, value=-1)
    torch.mul(second, cos2, out=right).addcmul_(first, sin2)
    return made


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, cos, sin = inputs
    ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, cos, sin)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, cos, sin = ctx.saved_tensors
    half = gradient.shape[-1] // 2
    of_x, of_cos, of_sin = ctx.needs_input_grad
    back = torch.ops.autopar.rotate(gradient, cos, -sin.roll(half, -1)) if of_x else None
    along = (gradient * x).sum_to_size(cos.shape) if of_cos else None
    if not of_sin:
        return back, along, None
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return back, along, (gradient * turned).sum_to_size(sin.shape)


def _empty(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


LIBRARY.define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor")
LIBRARY.impl("rotate", rotate, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::rotate", _empty, lib=LIBRARY)
torch.library.register_autograd("autopar::rotate", _backward, setup_context=_keep, lib=LIBRARY)
