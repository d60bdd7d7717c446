"""Sample calls of operators that look at neighbouring rows, or whose statistics run over split
dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.runtime.proof import Sample, sample
from tests.sharding.samples import f, n

# Kernel, dilation, padding, stride and rows; in the last ones the rows of input and output do not
# belong together.
KERNELS = (
    (3, 1, 1, 1, 12),
    (5, 1, 2, 1, 24),
    (7, 1, 3, 2, 24),
    (3, 2, 2, 1, 12),
    (3, 1, 1, 2, 24),
    (4, 1, 1, 2, 24),
    (5, 1, 2, 3, 36),
    (3, 1, 1, 3, 36),
    (2, 1, 0, 2, 24),
    (1, 1, 0, 1, 12),
    (1, 1, 0, 2, 24),
    (3, 1, 0, 1, 14),
    (3, 1, 1, 2, 13),
)
TRANSPOSED = (
    (2, 0, 2, 0, 1),
    (4, 1, 2, 0, 1),
    (3, 1, 2, 1, 1),
    (3, 1, 1, 0, 1),
    (1, 0, 2, 1, 1),
    (5, 2, 2, 1, 1),
    (3, 2, 1, 0, 2),
    (5, 1, 3, 0, 1),
    (6, 2, 2, 0, 1),
    (3, 0, 2, 0, 1),
)
POOLS = (
    (3, 1, 1, False),
    (3, 1, 2, False),
    (2, 0, 2, False),
    (3, 0, 2, True),
    (5, 2, 1, False),
    (3, 1, 2, True),
    (3, 1, 3, False),
)


def convolutions() -> Iterator[Sample]:
    """Kernels of all kinds along one, two and three dims."""
    for k, d, p, s, rows in KERNELS:
        note = f"kernel {k} dilation {d} padding {p} stride {s} rows {rows}"
        line: dict[str, Any] = {
            "input": n(2, 2, rows),
            "weight": n(2, 2, k),
            "bias": n(2),
            "stride": [s],
            "padding": [p],
            "dilation": [d],
        }
        yield sample("aten.conv1d.default", note, **line)
        plane: dict[str, Any] = {
            "input": n(1, 4, rows, rows),
            "weight": n(4, 2, k, k),
            "stride": [s, s],
            "padding": [p, p],
        }
        yield sample("aten.conv2d.default", f"groups, {note}", **plane, dilation=[d, d], groups=2)
    yield sample(
        "aten.conv3d.default",
        input=n(1, 2, 8, 4, 12),
        weight=n(2, 2, 3, 3, 3),
        bias=n(2),
        padding=[1, 1, 1],
    )
    yield sample(
        "aten.conv2d.default",
        "one image",
        input=n(2, 12, 8),
        weight=n(2, 2, 3, 3),
        bias=n(2),
        padding=[1, 1],
    )
    for k in (2, 3, 5):
        plane = {"input": n(2, 2, 12, 8), "weight": n(2, 2, k, k), "bias": n(2)}
        yield sample("aten.conv2d.padding", f"same {k}", **plane, padding="same", dilation=[2, 2])
        yield sample(
            "aten.conv1d.padding",
            f"same {k}",
            input=n(2, 2, 12),
            weight=n(2, 2, k),
            bias=n(2),
            padding="same",
        )
    for k, d, groups in ((4, 1, 4), (3, 2, 4), (2, 1, 1), (4, 1, 2)):
        yield sample(
            "autopar.causal_conv1d",
            f"kernel {k} dilation {d} groups {groups}",
            input=n(2, 4, 24),
            weight=n(4, 4 // groups, k),
            bias=n(4),
            dilation=[d],
            groups=groups,
        )


def transposed() -> Iterator[Sample]:
    """Transposed convolutions, by kernel, padding, stride, output padding and dilation."""
    for k, p, s, more, d in TRANSPOSED:
        note = f"kernel {k} padding {p} stride {s} more {more} dilation {d}"
        given: dict[str, Any] = {
            "input": n(1, 2, 12, 8),
            "weight": n(2, 2, k, k),
            "bias": n(2),
            "stride": [s, s],
            "padding": [p, p],
        }
        yield sample(
            "aten.conv_transpose2d.input",
            note,
            **given,
            output_padding=[more, more],
            dilation=[d, d],
        )


def pools() -> Iterator[Sample]:
    """Maxima and means, with and without padding; the last window may hang over the end."""
    for k, p, s, ceil in POOLS:
        note = f"kernel {k} padding {p} stride {s} ceil {ceil}"
        window = {"kernel_size": [k, k], "stride": [s, s], "padding": [p, p], "ceil_mode": ceil}
        yield sample("aten.max_pool2d.default", note, self=n(1, 2, 12, 24) - 2, **window)
        yield sample(
            "aten.max_pool1d.default",
            note,
            self=n(1, 2, 24) - 2,
            kernel_size=[k],
            stride=[s],
            padding=[p],
            ceil_mode=ceil,
        )
        for counted in (True, False):
            yield sample(
                "aten.avg_pool2d.default",
                f"{note} counted {counted}",
                self=n(1, 2, 12, 24),
                **window,
                count_include_pad=counted,
            )
    yield sample(
        "aten.avg_pool1d.default", self=n(1, 2, 24), kernel_size=[3], stride=[1], padding=[1]
    )
    yield sample(
        "aten.avg_pool2d.default",
        "divisor",
        self=n(1, 2, 12, 12),
        kernel_size=[3],
        stride=[1],
        padding=[1],
        divisor_override=5,
    )
    yield sample(
        "aten.max_pool3d.default", self=n(1, 1, 8, 8, 4), kernel_size=[3], stride=[1], padding=[1]
    )
    for size in (1, 3, 6, 12, 5):
        yield sample(
            "aten.adaptive_avg_pool2d.default",
            f"to {size}",
            self=n(2, 2, 12, 12),
            output_size=[size, size],
        )


def statistics() -> Iterator[Sample]:
    """Batch norms in training, and group norms over a space."""
    given: dict[str, Any] = {"training": True, "momentum": 0.1, "eps": 1e-5}
    none: dict[str, Any] = {"running_mean": None, "running_var": None, "cudnn_enabled": False}
    for space in ((), (12,), (6, 4)):
        x = n(12, 4, *space) + 3
        scales = {"weight": n(4), "bias": n(4)}
        yield sample("aten.batch_norm.default", f"{space}", input=x, **scales, **given, **none)
        yield sample(
            "aten.batch_norm.default",
            f"bare {space}",
            input=x,
            weight=None,
            bias=None,
            **given,
            **none,
        )
        running = {"running_mean": n(4), "running_var": f(4)}
        yield sample(
            "aten._native_batch_norm_legit_functional.default",
            f"{space}",
            input=x,
            **scales,
            **running,
            **given,
        )
        yield sample(
            "aten._native_batch_norm_legit.no_stats", f"{space}", input=x, **scales, **given
        )
        for groups in (1, 2, 4) if space else ():
            yield sample(
                "aten.group_norm.default", f"{groups} {space}", input=x, num_groups=groups, **scales
            )


FAMILIES = {
    "convolutions": convolutions,
    "transposed": transposed,
    "pools": pools,
    "statistics": statistics,
}
