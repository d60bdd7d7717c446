"""The kernels that a framework runs for a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costmodel.device.device import TF32
from autopar.errors import UsageError, unknown
from autopar.ir.recipes import RECIPES

ATTENTIONS = ("unfused", "fused", "flash1", "triton", "flash2", "flash3", "cudnn")
"""Attention: separate kernels for scale, mask and softmax; these in one kernel; kernels that never
write the scores.
"""
LIBRARY = "fused"
"""Attention with scale, mask and softmax in one kernel. All others but `unfused` are one kernel
from queries to results.
"""
NORMS = ("fused", "unfused")
DISPATCHERS: Mapping[str, str] = {"allgather": "masked", "alltoall": "dispatch", "node": "once"}
"""How the rows of tokens come to the ranks of their experts, and what rules call it.

- allgather: the rows of all ranks to each.
- alltoall: each row of a token by itself, in an all-to-all.
- node: a row once to every node that has experts of a token, and on inside it, by kernels of their
  own (DeepEP, HybridEP).
"""
PRODUCTS = ("", *dict.fromkeys(recipe.kernel for recipe in RECIPES.values()), TF32)
"""The types to which linear operators of the layers cast their operands: none, 8 bits with a scale
for each tensor or each block, or 4 bits. With the last one all products read float32 as tensor
units do, and nothing is cast.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels that a framework runs for a transformer.

    `attention`: of `ATTENTIONS`. `norm`: of `NORMS`, one kernel or the chain of elementwise kernels
    in float32. `products`: of `PRODUCTS`. `joined`: gate and up are one product, as are queries,
    keys and values. `wide_loss`: the loss reads logits that a kernel of its own has cast to
    float32. `repeats_keys`: keys and values are copied for every head. `skips_masked`: the kernel
    of scale, mask and softmax skips scores behind a causal mask; it needs a number of score
    matrices divisible by four (Megatron-LM, fused_softmax.py and
    scaled_upper_triang_masked_softmax.h). `biases_apart`: the last biases of experts are added
    expert by expert in float32. `dispatcher`: of `DISPATCHERS`, or "" for any of them.
    """

    attention: str = "flash2"
    norm: str = "fused"
    products: str = ""
    joined: bool = False
    wide_loss: bool = True
    repeats_keys: bool = False
    skips_masked: bool = False
    biases_apart: bool = False
    dispatcher: str = "alltoall"

    def __post_init__(self) -> None:
        for name, valid in (
            ("attention", ATTENTIONS),
            ("norm", NORMS),
            ("products", PRODUCTS),
            ("dispatcher", ("", *DISPATCHERS)),
        ):
            if getattr(self, name) not in valid:
                raise UsageError(unknown(name, getattr(self, name), [v or "''" for v in valid]))

    @property
    def one_kernel(self) -> bool:
        """Whether attention never writes its scores."""
        return self.attention not in ("unfused", LIBRARY)
