"""The local sizes and operations of attention under every strategy, read from its rule's factors.

The factors of a rule of attention have letters: g groups of heads with keys of their own, r heads
in a group, q queries, k keys, w the width of queries and keys, e that of values, and x the dims of
a mask; all others are batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES
from autopar.ir.recipes import WINDOWED
from autopar.sharding.model_flops import computed_share
from autopar.sharding.notation import Rule
from autopar.sharding.rules import RULES, Call

from .attention import Scores

Floats = NDArray[np.float64]

PASSES = 14
"""How often a score in single precision is read or written where no kernel holds it: the product,
a mask, the log of the sum of a row, its weight (`autopar/torch_operators/attention_blocks.py`).
"""
CAPPED = 4
"""Further times of a capped one."""


def attention_flops(call: Call, rule: Rule, local: Floats) -> Floats:
    """Operations of the products of a forward pass, from the local size of every factor.

    `local`: array [strategies, factors].
    """
    flops = np.zeros(len(local))
    for left_out in RULES[call.operator.kind].products:
        members = [i for i, f in enumerate(rule.factors) if not f.name.startswith(tuple(left_out))]
        flops += 2 * np.prod(local[:, members], axis=1)
    return flops * computed_share(call, rule)


def moved_scores(call: Call, scores: Scores) -> Floats:
    """Bytes of scores that a forward pass moves where it runs in kernels of its own."""
    masked = call.operator.kind == WINDOWED and call.position("attn_mask") is not None
    capped = bool(call.get("cap"))
    if not masked and not capped:
        return np.zeros(1)
    pairs = scores.batch * scores.heads * scores.queries * scores.pairs(0.0, 0.0)[0]
    return np.asarray((PASSES + CAPPED * capped) * DTYPE_BYTES["float32"] * pairs)


def local_scores(call: Call, rule: Rule, local: Floats, dtype: str) -> Scores:
    """The local sizes of attention in `dtype`, from the local size of every factor."""
    sizes = {letter: np.ones(len(local)) for letter in "grqkweb"}
    for i, factor in enumerate(rule.factors):
        # The dims of a mask (x, xm) are no loops of the products.
        if factor.name[0] == "x":
            continue
        letter = factor.name[0] if len(factor.name.rstrip("0123456789")) == 1 else "b"
        if letter not in sizes:
            letter = "b"
        sizes[letter] = sizes[letter] * local[:, i]
    window = call.get("window", default=0)
    # With keys and values of different widths, a kernel's two products take as long as at their
    # mean.
    width = np.where(sizes["e"] > 1, (sizes["w"] + sizes["e"]) / 2, sizes["w"])
    return Scores(
        batch=sizes["b"],
        heads=sizes["g"] * sizes["r"],
        kv_heads=sizes["g"],
        queries=sizes["q"],
        keys=sizes["k"],
        width=width,
        causal=call.get("is_causal") is True,
        window=float(window) if isinstance(window, int) else 0.0,
        itemsize=DTYPE_BYTES[dtype],
    )
