"""`Device`: one accelerator, or one rank of a host, and its rates.

Times are in seconds, sizes in bytes, rates in bytes or operations per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import ClusterError, unknown
from autopar.ir import DTYPE_BYTES

from .host_actions import HOST_ACTIONS
from .measured_kernels import Kernels

TF32 = "tfloat32"
# A dtype without a figure of its own runs at the rate of this family.
FAMILIES: Mapping[str, str] = {
    **{dtype: "int" for dtype in DTYPE_BYTES if "int" in dtype or dtype == "bool"},
    **{dtype: dtype for dtype in ("float64", "float32", "float16", "bfloat16")},
    **{dtype: "float8" for dtype in DTYPE_BYTES if dtype.startswith("float8")},
    "complex64": "float32",
    "complex128": "float64",
    # Operands with a scale for each block of elements.
    "float8_block": "float8_block",
    "float4": "float4",
    # Operands of float32 of which products read 19 bits.
    TF32: TF32,
}
ITEMSIZE: Mapping[str, float] = {**DTYPE_BYTES, "float8_block": 1.0, "float4": 0.5625, TF32: 4.0}
"""Bytes of an operand's element, with its share of a block's scale."""


def check(
    where: str,
    *,
    above: Mapping[str, float] | None = None,
    least: Mapping[str, float] | None = None,
) -> None:
    """Require positive, finite figures in `above`, and finite ones in `least` that may be zero."""
    for name, value in (above or {}).items():
        if not 0 < value < math.inf:
            raise ClusterError(f"{where}: {name} is {value}; it must be positive and finite")
    for name, value in (least or {}).items():
        if not 0 <= value < math.inf:
            raise ClusterError(f"{where}: {name} is {value}; it must be finite and not negative")


LEAST_FRACTION = 1e-6
"""The least fraction of a rate: seconds behind a smaller one would overflow."""


def check_fractions(where: str, **fractions: float) -> None:
    for name, value in fractions.items():
        if not LEAST_FRACTION <= value <= 1:
            raise ClusterError(
                f"{where}: {name} is {value}; it must be at least {LEAST_FRACTION:g} and at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one rank of a host.

    `peak`: FLOP/s by family of dtypes (float64, float32, float16, bfloat16, float8, int).
    `kernels`: measured constants of products, attention and grouped products (None: not measured).
    `clock`: the arithmetic rate of this device over that of the measured one (it has another power
    limit). Without kernels: `matmul_fraction`: the share of the peak that large matrix products
    reach; `half_size`: the smallest dimension at which half of that remains; `attention`: the
    fraction of the peak that a kernel reaches, by "flash2.forward". `memory_fraction`: the share of
    `memory_bandwidth` (B/s) that a streaming operator reaches. `update_fraction`: the share that an
    optimizer's step reaches (above 1 where caches hold what it reads again; None: as
    `memory_fraction`). `launch`: seconds per operator. `host`: seconds of the host by action, where
    it computes itself (`HOST_ACTIONS`); an update that is not among them takes a launch.
    `reserved`: bytes of `memory_capacity` that the framework and the communication library keep.
    `dispatch`: seconds of the host per operator (the host runs ahead of the device while kernels
    take longer). `units`: processors that compute the tiles of a matrix product (0: as `kernels`
    say, or not known). `ragged_fraction`: the remaining share of the rate for products whose rows
    are no multiple of 16 bytes. `host_bandwidth`: B/s one way between the device and its host.
    `host_memory`: bytes of the host per device. None: not known.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_fraction: float
    memory_capacity: float
    launch: float
    reserved: float
    kernels: Kernels | None = None
    clock: float = 1.0
    matmul_fraction: float = 1.0
    half_size: float = 0.0
    dispatch: float = 0.0
    units: float = 0.0
    ragged_fraction: float = 1.0
    update_fraction: float | None = None
    host: Mapping[str, float] = field(default_factory=dict, hash=False)
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)
    host_bandwidth: float | None = None
    host_memory: float | None = None

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.peak:
            raise ClusterError(f"{where}: no peak FLOP/s is given for any dtype")
        for family in self.peak:
            if family not in FAMILIES.values():
                raise ClusterError(
                    f"{where}: " + unknown("dtype family", family, sorted(set(FAMILIES.values())))
                )
        for action in self.host:
            if action not in HOST_ACTIONS:
                raise ClusterError(
                    f"{where}: " + unknown("action of the host", action, HOST_ACTIONS)
                )
        rates = {f"peak of {family}": value for family, value in self.peak.items()}
        given = {
            "host_bandwidth": self.host_bandwidth,
            "host_memory": self.host_memory,
            "update_fraction": self.update_fraction,
        }
        optional = {name: value for name, value in given.items() if value is not None}
        check(
            where,
            above={
                **rates,
                "memory_bandwidth": self.memory_bandwidth,
                "memory_capacity": self.memory_capacity,
                **optional,
            },
            least={
                "half_size": self.half_size,
                "launch": self.launch,
                "dispatch": self.dispatch,
                "reserved": self.reserved,
                **{f"host seconds of {action}": value for action, value in self.host.items()},
            },
        )
        check_fractions(
            where,
            clock=self.clock,
            matmul_fraction=self.matmul_fraction,
            memory_fraction=self.memory_fraction,
            ragged_fraction=self.ragged_fraction,
            **{f"attention of {kernel}": value for kernel, value in self.attention.items()},
        )
        if self.reserved >= self.memory_capacity:
            raise ClusterError(
                f"{where}: reserved is {self.reserved} B of {self.memory_capacity} B; nothing is "
                "left"
            )

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`, one of `DTYPE_BYTES`."""
        if dtype not in FAMILIES:
            raise ClusterError(unknown("dtype", dtype, FAMILIES))
        family = FAMILIES[dtype]
        if self.kernels is not None and family not in self.peak and family in self.kernels.peak:
            return self.kernels.peak[family]
        if family == TF32 and family not in self.peak:
            # Tensor units read half as many operands of four bytes as of two; devices without such
            # units add up in float32.
            return max(self.peak.get("float32", 0.0), self.peak.get("bfloat16", 0.0) / 2)
        if family not in self.peak:
            raise ClusterError(
                f"device {self.name!r} has no peak FLOP/s for {dtype}; it has "
                f"{', '.join(sorted(self.peak))}"
            )
        return self.peak[family]

    def host_seconds(self, action: str) -> float:
        """Seconds of the host for one of `HOST_ACTIONS`.

        Where they were not measured an update takes a launch, and all others nothing.
        """
        return self.host.get(action, self.launch if action == "update" else 0.0)

    @property
    def usable_memory(self) -> float:
        """Bytes that a plan may fill."""
        return self.memory_capacity - self.reserved

    def shared(self, factor: float) -> Device:
        """Return the device with `factor` times the compute and memory.

        That is the share of a rank where more or fewer ranks divide the host.
        """
        return replace(
            self,
            peak={family: value * factor for family, value in self.peak.items()},
            memory_bandwidth=self.memory_bandwidth * factor,
            memory_capacity=self.memory_capacity * factor,
            reserved=self.reserved * factor,
            host_bandwidth=None if self.host_bandwidth is None else self.host_bandwidth * factor,
            host_memory=None if self.host_memory is None else self.host_memory * factor,
        )
