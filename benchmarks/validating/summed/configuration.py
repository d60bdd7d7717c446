"""A known training run: its parallel degrees, its schedule, and its experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from autopar.costmodel.frameworks import Framework, Habits, Kernels
from autopar.errors import UsageError, unknown
from autopar.ir import DTYPE_BYTES
from autopar.order.schedules import SCHEDULES
from benchmarks.validating.summed.dispatch import DISPATCHERS, SMS
from benchmarks.validating.summed.recompute_modules import MODULES, has_operator

from .folding import Axis, refined

RECOMPUTE = ("none", "selective", "full")


POSITIVE = (
    "global_batch",
    "micro_batch",
    "tensor",
    "pipeline",
    "data",
    "context",
    "expert",
    "dispatcher_sms",
    "interleave",
)
CONTEXTS = ("ring", "heads")
"""ring: keys and values travel around; heads: all-to-alls give every rank whole sequences of a
share of the heads.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Parallel degrees and schedule of a training run.

    `global_batch`: sequences of a step; `micro_batch`: sequences at once on a device. `kernels`:
    those of the framework. `context_by`: how the ranks of a sequence attend, of `CONTEXTS`.

    `recompute_modules`: of `MODULES`, if recompute is selective (none: `habits.selective`).
    `layout`: the letters of every chunk of the pipeline (`pipeline_layout`; empty: by
    `habits.partition`).

    `shards`: ranks, neighbours among those that reduce gradients together, which share out what
    ZeRO shares out; each group of them has a copy of all (hybrid sharding; 0: all replicas share).

    Experts:

    - `expert`: ranks that split the experts, neighbours among all ranks of a stage: those of tensor
      parallelism first, then of context and data parallelism (`folding`).
    - `expert_tensor`: ranks that split the inner dim of each expert, inside of the former (0: those
      of tensor parallelism, as in Megatron-Core without an argument).
    - `dispatcher`: how rows travel to experts, of `DISPATCHERS`. `dispatcher_sms`: multiprocessors
      of its own kernels, if it has any.
    - `overlap_experts`: they travel under the passes of another micro-batch (Megatron-Core,
      --overlap-moe-expert-parallel-comm). `overlap_shared`: under the experts of every token.
    - `capacity`: rows that an expert takes, over the mean; it drops further ones, and is padded to
      as many (0: no row is dropped or padded).
    """

    global_batch: int
    micro_batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    context_by: str = "ring"
    expert: int = 1
    expert_tensor: int = 0
    dispatcher: str = "alltoall"
    dispatcher_sms: int = SMS
    overlap_experts: bool = False
    overlap_shared: bool = False
    capacity: float = 0.0
    zero: int = 0
    shards: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    schedule: str = "1f1b"
    interleave: int = 1
    layout: tuple[str, ...] = ()
    kernels: Kernels = field(default_factory=Kernels)
    dtype: str = "bfloat16"
    habits: Habits = field(default_factory=Habits)

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise UsageError(
                    f"a configuration's {name} must be at least 1, not {getattr(self, name)}"
                )
        words: tuple[tuple[str, str, Collection[str]], ...] = (
            ("dtype", self.dtype, DTYPE_BYTES),
            ("context_by", self.context_by, CONTEXTS),
            ("recompute", self.recompute, RECOMPUTE),
            ("dispatcher", self.dispatcher, DISPATCHERS),
            *(("recompute module", name, MODULES) for name in self.recompute_modules),
        )
        for what, given, valid in words:
            if given not in valid:
                raise UsageError(unknown(what, given, valid))
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"ZeRO stages are 0 to 3, not {self.zero}")
        if self.shards < 0 or (self.shards and self.replicas % self.shards):
            raise UsageError(
                f"{self.replicas} replicas do not make groups of {self.shards} that share out"
            )
        if self.global_batch % (self.micro_batch * self.data):
            raise UsageError(
                f"a global batch of {self.global_batch} is no multiple of {self.data} x "
                f"{self.micro_batch} sequences"
            )
        if self.layout and len(self.layout) != self.pipeline * self.interleave:
            raise UsageError(
                f"a layout of {len(self.layout)} chunks is none of {self.pipeline} stages x "
                f"{self.interleave} chunks"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        """Require that the ranks of a stage make groups for experts, which fold."""
        if self.expert_tensor < 0 or self.capacity < 0:
            raise UsageError("expert_tensor and capacity must not be negative")
        if self.stage_devices % (self.expert * self.inner):
            raise UsageError(
                f"{self.stage_devices} ranks of a stage do not make groups of {self.expert} "
                f"expert-parallel ranks x {self.inner} that split an expert"
            )
        # With their rows replicated, each rank would send what the others send, too.
        folded = any(a.outside == "tensor" and a.inside != "inner" for a in self.axes)
        if folded and not self.sequence_parallel:
            raise UsageError(
                "tensor-parallel ranks that split the experts have rows of their own: "
                "sequence_parallel is needed"
            )

    def run_by(self, framework: Framework) -> Configuration:
        """The configuration in a framework."""
        return replace(self, habits=framework.habits, kernels=framework.kernels)

    def repeats(self, operator: str) -> bool:
        """Whether the backward pass recomputes an operator of a layer."""
        if self.recompute == "selective" and self.habits.saved_outputs:
            return not any(word in operator for word in self.habits.saved_outputs)
        if self.recompute == "selective" and self.recompute_modules:
            return any(has_operator(name, operator) for name in self.recompute_modules)
        return self.recompute == "full" or (
            self.recompute == "selective"
            and any(word in operator for word in self.habits.selective)
        )

    def discards(self, operator: str) -> bool:
        """Whether an operator's results are given up after use, and made again when read."""
        return self.recompute == "selective" and any(
            MODULES[name].discards and has_operator(name, operator)
            for name in self.recompute_modules
        )

    @property
    def inner(self) -> int:
        """The number of ranks that split the inner dim of each expert."""
        return self.expert_tensor or self.tensor

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The ranks of a stage as axes, outermost first."""
        outside = (("tensor", self.tensor), ("context", self.context), ("data", self.data))
        inside = (("inner", self.inner), ("expert", self.expert), ("replica", self.expert_replicas))
        return refined(outside, inside)

    @property
    def expert_replicas(self) -> int:
        """The number of ranks of a stage with the same experts."""
        return self.stage_devices // (self.expert * self.inner)

    @property
    def stage_devices(self) -> int:
        """Devices of a stage."""
        return self.tensor * self.data * self.context

    @property
    def devices(self) -> int:
        """Devices that it runs on."""
        return self.stage_devices * self.pipeline

    @property
    def replicas(self) -> int:
        """The number of devices that reduce their gradients together.

        They hold the same parameters, experts aside.
        """
        return self.data * self.context

    @property
    def copies(self) -> int:
        """The number of groups of replicas of which each has all states."""
        return self.replicas // self.shards if self.shards and self.zero else 1

    @property
    def sharing(self) -> int:
        """The number of replicas that share out states under ZeRO."""
        return self.replicas // self.copies

    @property
    def expert_sharing(self) -> int:
        """The number of ranks with the same experts that share out their states."""
        return max(self.expert_replicas // self.copies, 1)

    @property
    def whole_stages(self) -> bool:
        """Whether ZeRO-3 gathers and reduces once a step, not in the passes of a micro-batch."""
        return self.zero == 3 and self.pipeline > 1 and self.habits.whole_stages

    @property
    def whole_gradients(self) -> bool:
        """Whether ZeRO-3 sums whole gradients over micro-batches."""
        defers = self.zero == 3 and self.habits.defers and self.micro_batches > 1
        return defers or self.whole_stages

    @property
    def gathers(self) -> bool:
        """Whether every pass of a micro-batch gathers its parameters."""
        return self.zero == 3 and not self.whole_stages

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
