"""Scores of collectives on the points held out, by collective and size.

8-bit sums, which were not fitted, apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from autopar.costmodel import Cluster, bind_axes, collective_time, load_cluster
from autopar.costmodel.cluster.residual import left_by
from benchmarks.kernels.scores import Prices, Score, scored

from .collective_intervals import collective_interval
from .collective_rows import Row, collective_rows

PRESETS: Mapping[str, str] = {
    "a100_sxm": "dgx-a100-80g",
    "h100_sxm": "dgx-h100",
    "h200_sxm": "hgx-h200",
    "b200_sxm": "dgx-b200",
    "b300_sxm": "dgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
"""The clusters of the rows' devices."""


def predicted(row: Row, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of a row by the cost model and by neighbours, and the interval as two multiples."""
    among = cluster.sized(row.group)
    if not row.usual:
        without = tuple(
            replace(level, features=tuple(f for f in level.features if f != "in_switch"))
            for level in among.levels
        )
        among = replace(among, levels=without)
    (level,) = bind_axes(among, (row.group,)) or ("",)
    said = collective_interval(row.kind, row.nbytes, row.group, level=level, cluster=among)
    return (
        float(collective_time(row.kind, row.nbytes, row.group, level=level, cluster=among)),
        said.low,
        said.high,
    )


def collective_scores(data: Path, device: str) -> list[Score]:
    """The scores of one device; none if it is in no preset."""
    if device not in PRESETS:
        return []
    cluster = load_cluster(PRESETS[device])
    groups = dict[str, list[Row]]()
    for row in collective_rows(data, device):
        if row.held_out:
            apart = "" if row.usual else "8-bit "
            groups.setdefault(apart + left_by(row.kind, row.nbytes), []).append(row)
    scores = []
    for name, rows in sorted(groups.items()):
        seconds, low, high = np.array([predicted(row, cluster) for row in rows]).T
        measured = np.array([row.seconds for row in rows])
        prices = Prices(predicted=seconds, planned=seconds, low=low, high=high)
        scores.append(scored(device, name, measured, prices))
    return scores
