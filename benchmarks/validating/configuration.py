"""A published training run: its parallel degrees, its schedule, and its experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from autopar.costmodel.frameworks import DISPATCHERS, Framework, Habits, Kernels
from autopar.errors import UsageError, unknown
from autopar.ir import DTYPE_BYTES
from autopar.order.schedules import SCHEDULES

RECOMPUTE = ("none", "selective", "full")


POSITIVE = (
    "global_batch",
    "micro_batch",
    "tensor",
    "pipeline",
    "data",
    "context",
    "expert",
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

    `recompute_modules`: Megatron-Core's names, if recompute is selective (none: attention's core).
    `layout`: the letters of every chunk of the pipeline (`pipeline_layout`), `dealt`: or their
    numbers of layers (neither: by `habits.partition`).

    `shards`: ranks, neighbours among those that reduce gradients together, which share out what
    ZeRO shares out; each group of them has a copy of all (hybrid sharding; 0: all replicas share).

    Experts:

    - `expert`: ranks that split the experts, neighbours among all ranks of a stage.
    - `expert_tensor`: ranks that split the inner dim of each expert, inside of the former (0: those
      of tensor parallelism, as in Megatron-Core without an argument).
    - `dispatcher`: how rows travel to experts, of `DISPATCHERS`.
    - `overlap_experts`: they travel under the passes of another micro-batch (Megatron-Core,
      --overlap-moe-expert-parallel-comm).
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
    overlap_experts: bool = False
    zero: int = 0
    shards: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    schedule: str = "1f1b"
    interleave: int = 1
    layout: tuple[str, ...] = ()
    dealt: tuple[int, ...] = ()
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
        if self.stage_devices % (self.expert * self.inner):
            raise UsageError(
                f"{self.stage_devices} ranks of a stage do not make groups of {self.expert} "
                f"expert-parallel ranks x {self.inner} that split an expert"
            )

    def run_by(self, framework: Framework) -> Configuration:
        """The configuration in a framework."""
        kernels = replace(framework.kernels, dispatcher=self.dispatcher)
        return replace(self, habits=framework.habits, kernels=kernels)

    @property
    def inner(self) -> int:
        """The number of ranks that split the inner dim of each expert."""
        return self.expert_tensor or self.tensor

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
