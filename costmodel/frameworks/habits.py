"""The habits of a training framework: overlaps, storage and kernels, and cross entropies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import UsageError, unknown

PARTITIONS = ("even", "greedy", "items", "balanced")
"""Distributions of layers over stages.

- even: equally many on each stage.
- greedy: each stage takes the most, the last the rest.
- items: even, with embedding and head counted as layers.
- balanced: even in parameters, with embedding and head counted as the layers that hold as many.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A cross entropy, by the work of its kernels for each logit of a rank.

    `forward`, `backward`: bytes moved, including the cast of 16-bit logits. `at_most`: bytes alive
    at the peak. `wide`: whether the kernels work on logits cast to float32.
    """

    forward: float
    backward: float
    at_most: float
    wide: bool = True


LOSSES: Mapping[str, Loss] = {
    # float32 copy (6), its maximum (4), less that in place (8), exponentials in place (8), their
    # sum (4), over it in place (8); backward the softmax less one at the target, scaled in place
    # (8) and cast (6).
    "megatron": Loss(forward=38.0, backward=14.0, at_most=6.0),
    # The same with the elementwise steps between reductions in one kernel each, and scaling and
    # cast in one.
    "megatron-fused": Loss(forward=22.0, backward=6.0, at_most=6.0),
    # The passes of "megatron" over 16-bit logits, the difference to their maximum in a tensor of
    # its own.
    "megatron-narrow": Loss(forward=16.0, backward=4.0, at_most=4.0, wide=False),
    # Two passes of one kernel over 16-bit logits, the second of which writes their gradient in
    # their place; backward scales it.
    "in-place": Loss(forward=6.0, backward=4.0, at_most=2.0, wide=False),
    # One pass of a kernel over 16-bit logits; backward another writes their gradient beside them.
    "one-kernel": Loss(forward=2.0, backward=4.0, at_most=4.0, wide=False),
    # The same, and after the backward pass two metrics of the training, each with a float32 copy
    # of the logits (6) and its log-softmax (8).
    "one-kernel, two metrics": Loss(forward=30.0, backward=4.0, at_most=4.0, wide=False),
    # float32 copy (6), log-softmax (8); backward the gradient of the loss (4), that of the
    # log-softmax (12), and a cast (6).
    "torch": Loss(forward=14.0, backward=22.0, at_most=14.0),
    # A compiler puts cast, maximum and sum together and, backward, exponential, scaling and cast.
    "compiled": Loss(forward=6.0, backward=6.0, at_most=8.0),
}
"""Cross entropies by their kernels.

Sources: NVIDIA/Megatron-LM@d98e8a64: megatron/core/tensor_parallel/cross_entropy.py and
megatron/core/fusions/fused_cross_entropy.py; NVIDIA/TransformerEngine:
common/triton/cross_entropy.py; Dao-AILab/flash-attention: losses/cross_entropy.py; torch's
log_softmax and nll_loss.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """A training framework's overlaps and storage: facts of a program, not figures of hardware.

    Overlap of communication:

    - `overlap_tensor`: tensor-parallel collectives of the backward pass run under the products of
      weight gradients.
    - `pipelined_tensor`: tensor-parallel collectives of both passes run piece by piece under
      neighbouring products.
    - `overlap_gradients`: the reduction of gradients runs under the last backward pass.
    - `overlap_gather`: with ZeRO-1 updated parameters are gathered under the next step's first
      forward pass.
    - `overlap_sends`: pipeline messages run under computation. `overlap_chunk_sends`: so they do
      where a stage has several chunks.
    - `prefetch`: the next layer's parameters are gathered under the present layer.
    - `by_layer`: parameters of a layer travel together.

    Messages:

    - `regather`: results of sequence-parallel gathers are not kept, but gathered again under the
      input gradient's product.
    - `scatter_sends`: tensor-parallel ranks send a share each and gather on arrival.
    - `gather_rate`: the highest rate at which parameters are gathered and gradients scattered, B/s.
    - `whole_stages`: with stages, ZeRO-3 gathers a stage's parameters once a step, under its first
      forward pass.

    Kernels and host:

    - `fused_accumulation`: products of weight gradients add to those of earlier micro-batches
      without a pass of their own.
    - `casts_gradients`: gradients are cast to the type of their sum, and added, by kernels of their
      own.
    - `fused`: chains of elementwise operators are one kernel, which keeps what goes in.
    - `compiled`: the host runs ahead of the device whatever the kernels; `blocking`: it waits for
      every kernel. `graphed`: attention and routers are recorded graphs, so that of a layer the
      host issues experts alone.
    - `loss`: of `LOSSES`. `partition`: of layers over stages, of `PARTITIONS`.

    Bytes:

    - `saves_outputs`: of a layer of which some is recomputed, the other operators keep what they
      make, and their inputs are made again.
    - `discards_outputs`: results of what is recomputed, but attention and experts, are given up,
      too, and made again by their readers.
    - `gradient_bytes`: of an element of gradients summed over micro-batches.
    - `reduced_bytes`: of an element in the reduction.
    - `accumulation_bytes`: moved per parameter and micro-batch by such a sum (None: read both,
      write one).
    - `state_bytes`: of the optimizer per parameter (master weight and moments).
    - `update_traffic`: moved per parameter by an update.
    """

    overlap_tensor: bool = False
    pipelined_tensor: bool = False
    regather: bool = False
    overlap_gradients: bool = False
    overlap_gather: bool = False
    overlap_sends: bool = False
    overlap_chunk_sends: bool = False
    prefetch: bool = True
    by_layer: bool = True
    scatter_sends: bool = True
    fused_accumulation: bool = False
    casts_gradients: bool = False
    compiled: bool = False
    graphed: bool = False
    fused: bool = False
    loss: str = "torch"
    gradient_bytes: int = 4
    reduced_bytes: int = 4
    accumulation_bytes: float | None = None
    partition: str = "even"
    blocking: bool = False
    gather_rate: float = math.inf
    saves_outputs: bool = False
    discards_outputs: bool = False
    whole_stages: bool = False
    state_bytes: float = 12
    update_traffic: float = 34

    def overlaps_sends(self, chunks: int) -> bool:
        """Whether messages between stages of so many chunks run under computation."""
        return self.overlap_sends or (self.overlap_chunk_sends and chunks > 1)

    def __post_init__(self) -> None:
        for name, valid in (("partition", PARTITIONS), ("loss", LOSSES)):
            if getattr(self, name) not in valid:
                raise UsageError(unknown(name, getattr(self, name), valid))
