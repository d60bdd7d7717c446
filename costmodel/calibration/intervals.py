"""Intervals of prices: multiples of a price between which nine measurements in ten lie.

    interval = exp(5th, 50th, 95th percentile of log(measured / predicted))

Each row is predicted by constants fitted without its shape (`device.measured_kernels.Fitted`,
`Level.residuals`). Kernels by a data sheet have the errors of devices left out as a whole. All
other unmeasured kinds have the wide intervals below. They are those of every measured device's
rows, priced with the constants of every other device, scaled by data sheets
(`benchmarks/fit_devices.py --transfer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.residual import Residual
from autopar.costmodel.cluster.source import Kind, Source
from autopar.costmodel.device import FAMILIES
from autopar.costmodel.device.kernel_seconds import TENSOR, experts_kernel, stands_for
from autopar.costmodel.device.measured_kernels import SHEET, Fitted
from autopar.errors import ClusterError, unknown
from autopar.ir import DTYPE_BYTES

from .run_kinds import EXPERTS, NARROW_TYPES, RUN_KINDS, UNMEASURED, WIDE_TYPES

WIDE: Mapping[str, tuple[float, float]] = {
    "products": (0.73, 1.41),
    "attention": (0.56, 1.75),
    "grouped": (0.61, 2.41),
    "elementwise": (0.8, 1.25),
    "collectives": (0.6, 1.6),
}
"""Least and most of measured over predicted by kind, where no row says more. No table of rows
exists for elementwise operators: assumed.
"""
STEP: Mapping[str, Residual] = {
    WIDE_TYPES: Residual(low=-0.1613, middle=0.0087, high=0.2239, rows=410),
    NARROW_TYPES: Residual(low=-0.3083, middle=0.018, high=0.301, rows=65),
    EXPERTS: Residual(low=-0.2979, middle=0.1112, high=0.517, rows=78),
    UNMEASURED: Residual(low=-0.7116, middle=0.1801, high=1.5339, rows=34),
}
NO_PROFILE: Mapping[str, Residual] = {
    WIDE_TYPES: Residual(low=-0.1486, middle=0.0427, high=0.4423, rows=136),
    NARROW_TYPES: Residual(low=-0.4491, middle=0.0115, high=0.6973, rows=31),
}
BY_DATA_SHEET: Mapping[str, Residual] = {
    WIDE_TYPES: Residual(low=-0.2103, middle=-0.0635, high=0.222, rows=136),
    NARROW_TYPES: Residual(low=-0.3938, middle=-0.0394, high=0.7737, rows=31),
}
MEMORY = Residual(low=-0.3739, middle=0.0248, high=0.445, rows=144)
"""Errors of predicted steps, by kind of run, and of memory peaks on published runs: as they ran, by
the habits that most frameworks share, and by kernels that saw no row of the device.

No price is fitted with them. Quantiles are such that whole sources that are left out have nine in
ten rows inside the interval of the others (`benchmarks/validating/held_out.py`);
docs/published-runs.md has the share inside for each kind, and the source that has the least.
"""
BACKWARD = 1.2
"""Widening of the interval of backward attention, whose rule rests on published ratios, not on
rows: assumed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The multiples of a price between which nine in ten measurements lie, `low` to `high`.

    Half of them lie below `middle` times the price. `rows`: the number of rows behind it.
    """

    low: float
    middle: float
    high: float
    rows: int
    source: Source

    @property
    def assumed(self) -> bool:
        """Whether no row stands behind it."""
        return self.source.kind == "assumed"

    def wider(self, factor: float, why: str) -> Interval:
        """The interval, wider on both sides by an assumed factor."""
        said = Source(text=f"{self.source.text}; {why}", kind="assumed")
        return Interval(
            low=self.low / factor,
            middle=self.middle,
            high=self.high * factor,
            rows=self.rows,
            source=said,
        )


def kernel_interval(
    cluster: Cluster, kind: str, what: str = "", *, direction: str = "forward"
) -> Interval:
    """Return the interval of a `kind` of kernels of the cluster's device.

    `kind` with `what`: "products" and "grouped" of a dtype, "attention" of a framework's kernel
    ("flash2") in a `direction`, or "elementwise".

    >>> from autopar.costmodel import load_cluster
    >>> interval = kernel_interval(load_cluster("dgx-h100"), "products", "bfloat16")
    >>> 0.8 < interval.low < interval.middle < interval.high < 1.25 and not interval.assumed
    True
    """
    if kind not in WIDE or kind == "collectives":
        raise ClusterError(
            unknown("kind of kernels", kind, [name for name in WIDE if name != "collectives"])
        )
    interval = _KINDS[kind](cluster, what)
    if interval is None:
        return wide(kind)
    # Constants of another device say nothing certain about this one.
    borrowed = cluster.sources.get("device.kernels")
    if borrowed is not None and borrowed.kind == "assumed":
        return wide(kind)
    backward = kind == "attention" and direction == "backward"
    return (
        interval.wider(BACKWARD, "backward by a rule of published ratios") if backward else interval
    )


def step_interval(cluster: Cluster, kind: str = WIDE_TYPES, *, profile: bool = True) -> Interval:
    """The interval of the seconds of a predicted step, from published runs of this `kind`.

    `profile`: whether the habits of the framework were read. Where the device's kernels are those
    of its data sheet, it is the interval of runs priced so. Where nobody measured its products, and
    no run tells, it is wider by the errors of products.
    """
    if kind not in STEP:
        raise ClusterError(unknown("kind of run", kind, RUN_KINDS))
    left = STEP[kind]
    said = f"published runs, {kind}"
    if not profile and kind in NO_PROFILE:
        left = _wider(left, NO_PROFILE[kind])
        said += ", of frameworks as of any other"
    products = _products(cluster, "bfloat16")
    if _by_data_sheet(cluster) and kind in BY_DATA_SHEET:
        left = _wider(left, BY_DATA_SHEET[kind])
        return interval_of(left, Source(text=f"{said}, by kernels of other devices", kind="fitted"))
    interval = interval_of(left, Source(text=said, kind="fitted"))
    if products is not None and not _by_data_sheet(cluster):
        return interval
    low, high = WIDE["products"] if products is None else (products.low, products.high)
    text = f"{said}, on other devices; no products of {cluster.device.name} were measured"
    return Interval(
        low=interval.low * low,
        middle=interval.middle,
        high=interval.high * high,
        rows=0,
        source=Source(text=text, kind="assumed"),
    )


def _wider(one: Residual, other: Residual) -> Residual:
    """The residuals of the second kind, at no end narrower than the first."""
    low = min(one.low, other.low)
    high = max(one.high, other.high)
    return Residual(low=low, middle=other.middle, high=high, rows=other.rows)


def _by_data_sheet(cluster: Cluster) -> bool:
    kernels = cluster.device.kernels
    return kernels is not None and kernels.name == SHEET


def memory_interval() -> Interval:
    """The interval of a device's bytes at the predicted peak."""
    return interval_of(MEMORY, Source(text="published runs", kind="fitted"))


def chance_to_fit(nbytes: float, room: float) -> float:
    """The probability that a step needs at most `room` bytes where `nbytes` are predicted.

    The logarithm of needed over predicted has the quantiles of `MEMORY`, as two halves of normal
    distributions that meet in its median.

    >>> round(chance_to_fit(1.0, math.exp(MEMORY.high)), 2), round(chance_to_fit(9.0, 1.0), 2)
    (0.95, 0.0)
    """
    if nbytes <= 0 or room <= 0:
        return float(nbytes <= 0)
    margin = math.log(room / nbytes) - MEMORY.middle
    side = MEMORY.high - MEMORY.middle if margin > 0 else MEMORY.middle - MEMORY.low
    return 0.5 * math.erfc(-margin / side * _NINE_TENTHS / math.sqrt(2))


_NINE_TENTHS = 1.6449
"""Standard deviations on either side of the mean between which nine tenths of a normal distribution
lie.
"""


def assumed_constants(cluster: Cluster) -> list[str]:
    """Names of the constants of a cluster that rest on no measurement and no data sheet."""
    return sorted(name for name, source in cluster.sources.items() if source.kind == "assumed")


def _products(cluster: Cluster, dtype: str) -> Interval | None:
    """The interval of products; another family's only if tensor units run both alike."""
    family = _family(dtype)
    kernels = cluster.device.kernels
    # Rows of tensor units say nothing about products that other units run.
    measured = stands_for(family, kernels) if kernels else family
    return (
        _fitted(cluster, f"products {measured}") if measured == family or family in TENSOR else None
    )


def _grouped(cluster: Cluster, dtype: str) -> Interval | None:
    kernels = cluster.device.kernels
    kernel = experts_kernel(_family(dtype), kernels) if kernels else None
    return _fitted(cluster, f"grouped {kernel}")


def _elementwise(cluster: Cluster, _: str) -> Interval | None:
    return _fitted(cluster, "elementwise")


def _attention(cluster: Cluster, name: str) -> Interval | None:
    """Return the interval of an attention kernel.

    A kernel that is priced by another one has a wider interval, by the assumed ratio.
    """
    kernels = cluster.device.kernels
    if kernels is None or name not in kernels.generations:
        return None
    entry = kernels.generations[name]
    interval = _fitted(cluster, f"attention {entry.kernel}")
    said = Source.of(entry.source)
    return (
        interval.wider(BACKWARD, entry.source)
        if interval is not None and said.kind == "assumed"
        else interval
    )


_KINDS = {
    "products": _products,
    "grouped": _grouped,
    "attention": _attention,
    "elementwise": _elementwise,
}


def _family(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ClusterError(unknown("dtype", dtype, DTYPE_BYTES))
    return FAMILIES[dtype]


def _fitted(cluster: Cluster, name: str) -> Interval | None:
    """The interval of constants from their rows; None if there are none."""
    kernels = cluster.device.kernels
    fit = kernels.fits.get(name) if kernels else None
    if fit is None or not _known(fit):
        return None
    kind: Kind = "measured" if fit.kind == "measured" else "fitted"
    left = Residual(low=fit.low, middle=fit.middle, high=fit.high, rows=fit.rows)
    return interval_of(left, Source(text=f"{name}: {fit.source}", kind=kind))


def _known(fit: Fitted) -> bool:
    return fit.low < fit.high and fit.kind != "assumed"


def interval_of(left: Residual, source: Source) -> Interval:
    low, middle, high = (math.exp(value) for value in (left.low, left.middle, left.high))
    return Interval(low=low, middle=middle, high=high, rows=left.rows, source=source)


def wide(kind: str) -> Interval:
    low, high = WIDE[kind]
    said = Source(text=f"no {kind} of this kind were measured here", kind="assumed")
    return Interval(low=low, middle=1.0, high=high, rows=0, source=said)
