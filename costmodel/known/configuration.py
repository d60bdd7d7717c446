"""A known training run: its parallel degrees, its schedule, and the habits of its framework."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import UsageError, unknown
from autopar.ir import DTYPE_BYTES
from autopar.order.schedules import SCHEDULES

from .graph_builder import Kernels

RECOMPUTE = ("none", "selective", "full")
CONTEXTS = ("ring", "heads")
"""ring: keys and values travel around; heads: all-to-alls give every rank whole sequences of a
share of the heads.
"""
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
    - `overlap_context`: messages of ring attention run under it.
    - `overlap_experts`: rows travel to experts and back under another micro-batch's work.
    - `overlap_gradients`: the reduction of gradients runs under the last backward pass.
    - `overlap_gather`: with ZeRO-1 updated parameters are gathered under the next step's first
      forward pass.
    - `overlap_sends`: pipeline messages run under computation.
    - `prefetch`: the next layer's parameters are gathered under the present layer.

    Messages:

    - `regather`: results of sequence-parallel gathers are not kept, but gathered again under the
      input gradient's product.
    - `sent_once`: a token's row goes once to every rank with experts of it, is sorted on arrival,
      and comes back once.
    - `scatter_sends`: tensor-parallel ranks send a share each and gather on arrival;
      `send_gathers`: the number of such gathers.
    - `reduce_whole`: ZeRO-1 reduces whole gradients on every rank.
    - `gather_rate`: the highest rate at which ZeRO-3 gathers and scatters, in B/s.

    Kernels and host:

    - `fused_accumulation`: products of weight gradients add to those of earlier micro-batches
      without a pass of their own.
    - `fused`: chains of elementwise operators are one kernel.
    - `compiled`: the host runs ahead of the device whatever the kernels; `blocking`: it waits for
      every kernel.
    - `filled`: every new tensor is filled before a kernel writes it.
    - `loss`: of `LOSSES`. `partition`: of layers over stages, of `PARTITIONS`.

    Recompute:

    - `recompute_ends`: embedding and head are recomputed too. `recomputed`: the share of the layers
      in full recompute.
    - `selective`: operators with one of these words in their names are recomputed selectively.
    - `saved_outputs`: instead, operators with these words save their outputs and all others are
      recomputed.

    Bytes:

    - `gradient_bytes`: of an element of gradients summed over micro-batches.
    - `reduced_bytes`: of an element in the reduction; `gathered_bytes`: in the gather of parameters
      (None: as used).
    - `accumulation_bytes`: moved per parameter and micro-batch by such a sum (None: read both,
      write one).
    - `state_bytes`: of the optimizer per parameter (master weight and moments).
    - `update_traffic`: moved per parameter by an update.
    - `weight_bytes`: of a stored parameter in use (None: of the dtype).
    - `offloaded`: the share of the layers whose activations wait in host memory. `workspace`:
      allocated for good by the framework's libraries. `expandable`: the allocator's segments grow
      (`memory.stage_occupancy`).
    """

    overlap_tensor: bool = False
    pipelined_tensor: bool = False
    regather: bool = False
    overlap_context: bool = False
    overlap_experts: bool = False
    sent_once: bool = False
    overlap_gradients: bool = False
    overlap_gather: bool = False
    overlap_sends: bool = False
    prefetch: bool = True
    scatter_sends: bool = True
    fused_accumulation: bool = False
    compiled: bool = False
    filled: bool = False
    fused: bool = False
    loss: str = "torch"
    gradient_bytes: int = 4
    reduced_bytes: int = 4
    gathered_bytes: float | None = None
    reduce_whole: bool = False
    accumulation_bytes: float | None = None
    blocking: bool = False
    partition: str = "even"
    send_gathers: float = 1.0
    recompute_ends: bool = False
    selective: tuple[str, ...] = (".core",)
    saved_outputs: tuple[str, ...] = ()
    recomputed: float = 1.0
    gather_rate: float = math.inf
    state_bytes: float = 12
    update_traffic: float = 34
    offloaded: float = 0.0
    workspace: float = 0.0
    expandable: bool = False
    weight_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, valid in (("partition", PARTITIONS), ("loss", LOSSES)):
            if getattr(self, name) not in valid:
                raise UsageError(unknown(name, getattr(self, name), valid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Parallel degrees and schedule of a training run.

    `global_batch`: sequences of a step; `micro_batch`: sequences at once on a device. `expert`: the
    number of `data` ranks that split the experts; a larger number includes the tensor-parallel
    ranks, which then have whole experts. `kernels`: those of the framework. `context_by`: how the
    ranks of a sequence attend, of `CONTEXTS`.
    """

    global_batch: int
    micro_batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    context_by: str = "ring"
    expert: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    schedule: str = "1f1b"
    interleave: int = 1
    kernels: Kernels = field(default_factory=Kernels)
    dtype: str = "bfloat16"
    habits: Habits = field(default_factory=Habits)

    def __post_init__(self) -> None:
        for name in (
            "global_batch",
            "micro_batch",
            "tensor",
            "pipeline",
            "data",
            "context",
            "expert",
            "interleave",
        ):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"a configuration's {name} must be at least 1, not {getattr(self, name)}"
                )
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(unknown("dtype", self.dtype, DTYPE_BYTES))
        if self.context_by not in CONTEXTS:
            raise UsageError(unknown("context_by", self.context_by, CONTEXTS))
        if self.recompute not in RECOMPUTE:
            raise UsageError(unknown("recompute", self.recompute, RECOMPUTE))
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"ZeRO stages are 0 to 3, not {self.zero}")
        if self.data % self.expert and self.expert != self.data * self.tensor:
            raise UsageError(
                f"{self.expert} expert-parallel ranks are no divisor of {self.data} data-parallel "
                "ones"
            )
        if self.global_batch % (self.micro_batch * self.data):
            raise UsageError(
                f"a global batch of {self.global_batch} is no multiple of {self.data} x "
                f"{self.micro_batch} sequences"
            )

    def repeats(self, operator: str) -> bool:
        """Whether the backward pass recomputes an operator of a layer."""
        if self.recompute == "selective" and self.habits.saved_outputs:
            return not any(word in operator for word in self.habits.saved_outputs)
        return self.recompute == "full" or (
            self.recompute == "selective"
            and any(word in operator for word in self.habits.selective)
        )

    @property
    def whole_experts(self) -> bool:
        """Whether tensor-parallel ranks split the set of experts, not each expert."""
        return self.expert > self.data

    @property
    def expert_data(self) -> int:
        """The number of data-parallel ranks that split the experts among them."""
        return min(self.expert, self.data)

    @property
    def devices(self) -> int:
        """Devices that it runs on."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def replicas(self) -> int:
        """The number of devices that reduce their gradients together.

        They hold the same parameters, experts aside.
        """
        return self.data * self.context

    @property
    def pipeline_schedule(self) -> str:
        """The schedule that runs: with several chunks a stage, one that allows them.

        Megatron's arguments name only the number of chunks and no schedule, so `schedule` may still
        be the default, which has one chunk a stage.
        """
        with_chunks = [row.name for row in SCHEDULES.values() if row.chunks]
        if self.interleave == 1 or self.schedule in with_chunks:
            return self.schedule
        return with_chunks[0]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, each through every stage."""
        return self.global_batch // (self.micro_batch * self.data)
