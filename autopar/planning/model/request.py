"""`Request`: the cluster, the limits and the fixed decisions of a planning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import OWN
from autopar.costmodel.step.mesh_prices import optimizer_named
from autopar.errors import UsageError, unknown
from autopar.file_limits import MICRO_BATCHES
from autopar.order.schedules import SCHEDULES
from autopar.search import SEARCHES
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh
from autopar.sharding.schedule import PLAIN, PLAINLY, Reductions, Types

from .recompute import read_recompute
from .restrictions import Limits, Space

ZEROS = (0, 1, 2, 3)
OFFLOADS = ("none", "optimizer")
HEADROOM = 0.04
"""The share of a device's memory that plans leave free if no limit is given, for the allocator's
slack.

Assumed. On 22 runs the allocator had reserved 3 to 8 % more than was allocated at the peak
(MooreThreads/SimuMax@4dcaae51, docs/b200).
"""


WITHOUT_LIMIT = 1e18
"""More bytes than any step needs, for plans that are wanted though they fit no device."""


def default_limit(cluster: Cluster) -> float:
    """The bytes that a plan may fill on a device if no limit is given."""
    return (1 - HEADROOM) * cluster.device.usable_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The subject of a search besides its graph: the devices, and all that is fixed about the plan.

    `target`: the project that runs the plan. `memory`: bytes of a device (None: the cluster's).
    `limits`: the allowed choices, from pins.
    `uniform`: the limits treat equal layers alike, so these may be folded. `fewer`: devices may
    stay idle if that is faster. `types`: of stored parameters and gradients. `reductions`: how
    gradients are reduced.

    `mesh`: of one stage. `recompute`: a mode, or modules (see `recompute`). `zero`: 0, parameters
    are stored whole; 1 and 2, stored split and gathered once a step, with gradients added up whole
    or as shards; 3, gathered for every pass. `offload`: "none", or "optimizer" for the optimizer
    state of all parameters in the host's memory. `hosted`: the parameters with their state there,
    if these are fixed. `space`: the part of the space that is searched (None: all of it).
    `cuts`: for each place where a stage may begin, such as between two layers, the operators before
    one of which it does (None: it may begin at any operator). `blocks`: those where stages begin
    unless others are worth it.
    `schedule`, `interleave`: the schedule, and its chunks a stage. `overlap_experts`: whether
    passes of two micro-batches are merged, so that exchanges of experts run under them (None: where
    that is faster and fits). `gap`: the share above its bound at which a plan is near enough (see
    `stops`). `seconds`: of the search. `certified`: bounds are raised once the plan is there (else
    its gap is what the search itself proves).
    """

    cluster: Cluster
    target: str = OWN
    train: bool = True
    optimizer: str = "adamw"
    search: str = "dynamic_programming"
    memory: float | None = None
    mesh: Mesh | None = None
    limits: Callable[[Analysis, Mesh], Limits] | None = None
    seed: int = 0
    stages: int | None = None
    micro_batches: int | None = None
    recompute: str | None = None
    zero: int | None = None
    offload: str | None = None
    hosted: frozenset[str] | None = None
    space: Space | None = None
    cuts: tuple[range, ...] | None = None
    blocks: tuple[range, ...] = ()
    schedule: str | None = None
    interleave: int | None = None
    overlap_experts: bool | None = None
    gap: float | None = None
    seconds: float | None = None
    certified: bool = True
    fewer: bool = True
    uniform: bool = False
    types: Types = PLAIN.types
    reductions: Reductions = PLAINLY

    def __post_init__(self) -> None:
        optimizer_named(self.optimizer)
        if not self.train and self.types != PLAIN.types:
            raise UsageError(
                "--master and --reduce are types of a training step; an inference has neither"
            )
        if self.search not in SEARCHES:
            raise UsageError(unknown("search method", self.search, SEARCHES))
        if self.memory is not None and self.memory <= 0:
            raise UsageError(f"the memory limit is {self.memory} bytes; it must be above 0")
        for name, count in (
            ("stages", self.stages),
            ("micro-batches", self.micro_batches),
            ("interleave", self.interleave),
        ):
            if count is not None and count < 1:
                raise UsageError(f"{name}: {count}; it must be at least 1")
            if count is not None and count > MICRO_BATCHES:
                raise UsageError(f"{name}: {count}; it must be at most {MICRO_BATCHES}")
        self._require_passes_to_merge()
        self._require_stops()
        read_recompute(self.recompute or "none")
        for what, value, valid in (
            ("offload", self.offload, OFFLOADS),
            ("pipeline schedule", self.schedule, tuple(SCHEDULES)),
            ("ZeRO stage", None if self.zero is None else str(self.zero), tuple(map(str, ZEROS))),
        ):
            if value is not None and value not in valid:
                raise UsageError(unknown(what, value, valid))
        if self.offload == "optimizer" and not self.has_host:
            raise UsageError(f"--offload optimizer: {self._why_not_offloaded()}")

    def _require_stops(self) -> None:
        if self.gap is not None and not 0 <= self.gap < math.inf:
            raise UsageError(f"the gap is {self.gap}; it must be a share of 0 or more, such as 5%")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError(f"the search has {self.seconds} seconds; it must have more than 0")

    def _require_passes_to_merge(self) -> None:
        if self.overlap_experts and not self.train:
            raise UsageError("--overlap-experts on: an inference has no backward passes")
        if self.overlap_experts and (self.stages is None or self.micro_batches in (None, 1)):
            raise UsageError(
                "--overlap-experts on merges passes of two micro-batches: say how many --stages "
                "and --micro-batches there are, two or more of the latter"
            )
        if self.overlap_experts and self.stages == 1:
            return
        if self.schedule in SCHEDULES and not self.schedules:
            merging = [name for name, row in SCHEDULES.items() if row.merges]
            raise UsageError(
                f"--schedule {self.schedule} with --overlap-experts "
                f"{'on' if self.overlap_experts else 'off'}: stages merge passes under "
                f"{' or '.join(merging)} alone"
            )

    def _why_not_offloaded(self) -> str:
        if not self.train or optimizer_named(self.optimizer).states == 0:
            return "no optimizer keeps state"
        if not optimizer_named(self.optimizer).streams:
            return f"{self.optimizer} updates all matrices together, not one after another"
        return f"no host_bandwidth is given for the device {self.cluster.device.name}"

    @property
    def folds(self) -> bool:
        """Whether equal layers may be folded: no pin tells them apart."""
        return self.limits is None or self.uniform

    @property
    def schedules(self) -> tuple[str, ...]:
        """The pipeline schedules to try."""
        named = tuple(SCHEDULES) if self.space is None else self.space.schedules
        if self.schedule is not None:
            named = (self.schedule,)
        merges = self.overlap_experts
        return tuple(name for name in named if merges in (None, SCHEDULES[name].merges))

    @property
    def has_host(self) -> bool:
        """Whether there is optimizer state to stream, and a host with a known link to keep it."""
        return (
            self.train
            and optimizer_named(self.optimizer).streams
            and self.cluster.device.host_bandwidth is not None
        )

    @property
    def may_offload(self) -> bool:
        """Whether the search decides which optimizer state is in host memory."""
        return self.has_host and self.offload is None and self.hosted is None

    @property
    def memory_limit(self) -> float:
        """The bytes that a plan may fill on a device."""
        return self.memory_limit_on(self.cluster)

    def memory_limit_on(self, cluster: Cluster) -> float:
        """The bytes that a plan may fill on a device of a part of the cluster."""
        return self.memory if self.memory is not None else default_limit(cluster)

    def host_on(self, cluster: Cluster) -> float:
        """The bytes of host memory for a device of a part of the cluster."""
        return math.inf if cluster.device.host_memory is None else cluster.device.host_memory
