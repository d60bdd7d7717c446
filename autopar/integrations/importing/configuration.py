"""The parallelism in a training configuration, in the words that all projects share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import UsageError
from autopar.file_limits import DEGREE
from autopar.printable import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Degrees and choices of a configuration; None: it does not say.

    `arguments`: those of Megatron-LM, by name; `sizes`: of the model, by argument.

    `launched`: processes that the file starts, if nobody asks for other ones.
    `data`: devices that split the batch; `shards`: those of them over which parameters are stored
    split (None: all of them if `zero`). `zero`: the ZeRO stage, 0 to 3. `tensor`: devices that
    split weights; `sequence_parallel`: whether these split the values in between. `context`:
    devices that split the sequence, by the scheme `context_scheme`. `expert`: devices that split
    experts, and the batch too. `expert_tensor`: devices that split each expert (None: those that
    split tensors).
    `stages`, `schedule`, `interleave`: of the pipeline. `dealt`: the layers of each chunk, where
    the file says so. `batch`: the global batch; `micro_batch`:
    samples of a device in a micro-batch; `local_batch`: samples of a device before gradients are
    reduced; both count where `micro_batches` is None. `recompute_modules`: those that a
    selective `recompute` names (none: as is best). `precision`: the recipe of products. `master`,
    `reduce`: the types of stored parameters and of travelling gradients. `styles`: splits of
    weights by module pattern. `lost`: sentences on options that are not taken over.
    """

    source: str
    launched: int | None = None
    data: int | None = None
    shards: int | None = None
    zero: int | None = None
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    context_scheme: str = "context"
    expert: int = 1
    expert_tensor: int | None = None
    stages: int = 1
    schedule: str | None = None
    interleave: int = 1
    dealt: tuple[int, ...] = ()
    batch: int | None = None
    sequence: int | None = None
    micro_batches: int | None = None
    micro_batch: int | None = None
    local_batch: int | None = None
    recompute: str | None = None
    recompute_modules: tuple[str, ...] = ()
    dtype: str | None = None
    precision: str | None = None
    master: str | None = None
    reduce: str | None = None
    optimizer: str | None = None
    offload: str | None = None
    styles: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Degrees are whole numbers from 1 on."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not _is_degree(value):
                what = f"{self.source}: {name.replace('_', ' ')} is {value!r}"
                raise UsageError(printable(f"{what}; it must be a whole number from 1 on"))
        if self.data is not None and (self.data * self.inner) % self.expert:
            raise UsageError(
                f"{self.source}: {self.data * self.inner} devices of a stage do not make groups of "
                f"{self.expert} for experts"
            )

    @property
    def inner(self) -> int:
        """Devices of a stage apart from those that split only the batch."""
        return self.tensor * self.context

    def degree_of_data(self, devices: int | None) -> int:
        """Devices that split the batch, of so many in all where the configuration does not say."""
        if self.data is not None:
            return self.data
        whole = self.inner * self.stages
        devices = devices or self.launched
        if devices is None:
            raise UsageError(
                f"{self.source} does not say how many devices split the batch: give --devices, "
                "the number of processes that are launched on all nodes"
            )
        if devices % whole:
            raise UsageError(
                f"{self.source}: {devices} devices do not make groups of {whole} (stages x tensor "
                "x context)"
            )
        return devices // whole

    def experts_on(self, data: int) -> int:
        """The devices that split experts in a plan: of those that split the batch, as many as fit.

        Those that split tensors come on top where experts are `folded` over them.
        """
        return math.gcd(self.expert // (self.tensor if self.folded else 1), data)

    @property
    def folded(self) -> bool:
        """Whether whole experts lie on the devices that split tensors elsewhere."""
        return self.expert_tensor == 1 < self.tensor and self.expert % self.tensor == 0

    def global_batch(self, devices: int | None) -> int | None:
        """The global batch on so many devices in all; None where the configuration tells none."""
        known = (devices, self.data, self.launched) != (None, None, None)
        if self.batch is not None or self.local_batch is None or not known:
            return self.batch
        return self.local_batch * (1 if self.styles else self.degree_of_data(devices))

    def count(self, data: int, batch: int | None) -> int | None:
        """Micro-batches of a step of so many samples on so many devices that split the batch."""
        if self.micro_batches is not None or self.micro_batch is None or batch is None:
            return self.micro_batches
        if batch % (self.micro_batch * data):
            raise UsageError(
                f"{self.source}: a global batch of {batch} is not made of {data} x micro-batches "
                f"of {self.micro_batch}"
            )
        return batch // (self.micro_batch * data)

    def devices(self, given: int | None) -> int:
        """All devices that it is for; an error where another number was given."""
        needed = self.degree_of_data(given) * self.inner * self.stages
        if given is not None and given != needed:
            raise UsageError(f"{self.source} is for {needed} devices, not {given}")
        return needed


def _is_degree(value: object) -> bool:
    # A file's `true` is an `int` of Python, too.
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= DEGREE


_NUMBERS = (
    "data",
    "shards",
    "tensor",
    "context",
    "expert",
    "expert_tensor",
    "stages",
    "interleave",
    "batch",
    "sequence",
    "micro_batches",
    "micro_batch",
    "local_batch",
)


def number(
    source: str, table: Mapping[str, Any], key: str, default: int | None = None
) -> int | None:
    """A whole number of a table."""
    value = table.get(key, default)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 12:
        return int(value)
    raise UsageError(
        printable(f"{source}: {key} is {value!r}, which is no whole number", lines=False)
    )


def degree(source: str, table: Mapping[str, Any], key: str) -> int:
    """A whole number in a table; 1 if it is missing."""
    value = number(source, table, key, 1)
    assert value is not None
    return value


def stage(source: str, value: int | None) -> int:
    """A stage of ZeRO; 0 if it is missing."""
    if value is not None and not 0 <= value <= 3:
        raise UsageError(f"{source}: ZeRO stage {value} is none of 0, 1, 2, 3")
    return value or 0


def left_out(names: Iterable[str], where: str = "") -> list[str]:
    """The sentence on options of a configuration that no plan has."""
    words = sorted(printable(name, lines=False) for name in names)
    if not words:
        return []
    shown = ", ".join(words[:12])
    if len(words) > 12:
        shown += f" and {len(words) - 12} more"
    return [f"not taken over{where}: {shown}"]
