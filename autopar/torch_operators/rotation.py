"""Rotary positions as one operator, which keeps its angles only.

    y = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)

x1 and x2 are the halves of the last dim, or the two elements of its pairs (Su et al., RoFormer,
2021). Each part is written where it belongs: half of the traffic of products, a join and a sum.
The gradient of x is a rotation, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .defining import LIBRARY


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False, into_pairs: bool = False
) -> Tensor:
    """`x` [..., w] turned by angles whose `cos` and `sin` [..., w or w / 2] broadcast to it.

    `pairs`, `into_pairs`: whether what belongs together lies side by side in x and in the result,
    and not half a row apart. Angles of one half are of both; others lie half a row apart.
    """
    first, second = _parts(x, pairs)
    made = torch.empty_like(x)
    left, right = _parts(made, into_pairs)
    cos1, cos2 = _angles(cos, x)
    sin1, sin2 = _angles(sin, x)
    torch.mul(first, cos1, out=left).addcmul_(second, sin1, value=-1)
    torch.mul(second, cos2, out=right).addcmul_(first, sin2)
    return made


def _parts(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    if pairs:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _angles(angle: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _parts(angle, False) if angle.shape[-1] == x.shape[-1] else (angle, angle)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool, bool], output: Tensor) -> None:
    x, cos, sin, ctx.pairs, ctx.into_pairs = inputs
    ctx.save_for_backward(x if any(ctx.needs_input_grad[1:3]) else None, cos, sin)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, cos, sin = ctx.saved_tensors
    sin1, sin2 = _angles(sin, gradient)
    of_x, of_cos, of_sin = ctx.needs_input_grad[:3]
    back = along = across = None
    if of_x:
        turned = -sin if sin1 is sin2 else -torch.cat((sin2, sin1), -1)
        given = (gradient, cos, turned, ctx.into_pairs, ctx.pairs)
        back = torch.ops.autopar.rotate(*given)
    if of_cos or of_sin:
        one, other = _parts(x, ctx.pairs)
        left, right = _parts(gradient, ctx.into_pairs)
        along = _summed(left * one, right * other, cos, x) if of_cos else None
        across = _summed(-left * other, right * one, sin, x) if of_sin else None
    return back, along, across, None, None


def _summed(first: Tensor, second: Tensor, angle: Tensor, x: Tensor) -> Tensor:
    """The gradient of an angle from those of both parts of a row."""
    whole = angle.shape[-1] == x.shape[-1]
    both = torch.cat((first, second), -1) if whole else first + second
    return both.sum_to_size(angle.shape)


def _empty(
    x: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False, into_pairs: bool = False
) -> Tensor:
    return torch.empty_like(x)


LIBRARY.define(
    "rotate(Tensor x, Tensor cos, Tensor sin, bool pairs=False, bool into_pairs=False) -> Tensor"
)
LIBRARY.impl("rotate", rotate, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::rotate", _empty, lib=LIBRARY)
torch.library.register_autograd("autopar::rotate", _backward, setup_context=_keep, lib=LIBRARY)
