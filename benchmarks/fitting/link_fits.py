"""The rows of each fitted link, and the fits written as links of `costmodel/presets/links`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.costmodel import Algorithm
from autopar.costmodel.cluster.residual import BIG, Residual, left_by
from autopar.costmodel.collectives.backends import TABLE

from .collective_rows import FOLDS, Points, Row, collective_rows
from .envelope import Fitted, fit

SHIPPED = Path(__file__).resolve().parents[2] / "costmodel" / "presets" / "links"
ROWS = (
    "ai-dynamo/aiconfigurator@095f58a5 (Apache-2.0): "
    "aic-core/src/aiconfigurator_core/systems/data, nccl-tests"
)
PROTOCOLS = ("ll", "ll128", "simple")
SWITCHED = ("switch_short", "switch_long")
COLLECTIVES = {
    "all_reduce": ["all_reduce", "barrier"],
    "all_gather": ["all_gather", "broadcast"],
    "reduce_scatter": ["reduce_scatter", "reduce"],
    "all_to_all": ["all_to_all", "gather", "scatter", "send"],
}
"""The collectives that run like each measured one."""
GATHERS = ("all_gather", "reduce_scatter")
FEW = 8
"""The least rows for which quantiles are written."""
RUN_BY = {"all_to_all": ["peer to peer", "message"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links to be fitted.

    `device`: of the rows. `bandwidth`: B/s one way by its data sheet (which counts both). `switch`:
    reduction in it. `like`: another device with the same links, whose rows of groups `beyond` a
    size are added if this device has few, except those of collectives `unlike`. `group`: the only
    group size that spans this level (0: all). `inside`: the links of the level inside.
    """

    name: str
    device: str
    bandwidth: float
    sheet: str
    switch: bool = False
    like: str = ""
    beyond: int = 0
    unlike: tuple[str, ...] = ()
    group: int = 0
    inside: str = ""

    def measured(self, kind: str) -> str:
        """The devices that the rows of a collective are of."""
        if self.like and kind not in self.unlike:
            return f"{self.device} and {self.like}"
        return self.device

    @property
    def members(self) -> int:
        """Devices of a unit inside, which share a port."""
        return max(self.group // 2, 1)


def _pcie(device: str, word: str, bandwidth: float, sheet: str) -> tuple[Links, ...]:
    """Pairs of devices, pairs of pairs, and all.

    Groups of 2, 4 and 8 neighbours, each crossing one more level.
    """
    names = [f"{level}-{word}" for level in ("pcie", "bridge", "socket")]
    return tuple(
        Links(
            name=name,
            device=device,
            bandwidth=bandwidth,
            sheet=sheet,
            group=2 ** (i + 1),
            inside=names[i - 1] if i else "",
        )
        for i, name in enumerate(names)
    )


LINKS = (
    Links(
        name="nvlink-a100",
        device="a100_sxm",
        bandwidth=300e9,
        sheet="NVIDIA A100 data sheet: NVLink 3, 600 GB/s",
    ),
    Links(
        name="nvlink-h100",
        device="h100_sxm",
        bandwidth=450e9,
        sheet="NVIDIA H100 data sheet: NVLink 4, 900 GB/s",
        switch=True,
    ),
    Links(
        name="nvlink-h200",
        device="h200_sxm",
        bandwidth=450e9,
        sheet="NVIDIA H200 data sheet: NVLink 4, 900 GB/s",
        switch=True,
        like="h100_sxm",
        unlike=("all_gather", "reduce_scatter", "all_to_all"),
    ),
    Links(
        name="nvlink-b200",
        device="b200_sxm",
        bandwidth=900e9,
        sheet="NVIDIA B200 data sheet: NVLink 5, 1.8 TB/s",
        switch=True,
    ),
    Links(
        name="nvlink-b300",
        device="b300_sxm",
        bandwidth=900e9,
        sheet="NVIDIA B300 data sheet: NVLink 5, 1.8 TB/s",
        switch=True,
        like="b200_sxm",
        unlike=("all_to_all",),
    ),
    Links(
        name="nvlink-gb200",
        device="gb200",
        bandwidth=900e9,
        sheet="NVIDIA GB200 NVL72: NVLink 5, 1.8 TB/s",
        switch=True,
    ),
    Links(
        name="nvlink-gb300",
        device="gb300",
        bandwidth=900e9,
        sheet="NVIDIA GB300 NVL72: NVLink 5, 1.8 TB/s",
        switch=True,
        like="gb200",
        beyond=4,
        unlike=("all_to_all",),
    ),
    *_pcie("l40s", "l40s", 32e9, "NVIDIA L40S data sheet: PCIe 4 x16"),
    *_pcie(
        "rtx_pro_6000_server",
        "rtx-pro-6000",
        64e9,
        "NVIDIA RTX PRO 6000 Server data sheet: PCIe 5 x16",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One collective of some links.

    The fit, its number of rows, and the errors on those held out (relative, signed).

    `crossed`: for each other row of the device its bytes, and log(measured / predicted) by a fit
    without its fold.
    """

    kind: str
    fitted: Fitted
    rows: int
    held_out: list[float]
    crossed: list[tuple[float, float]]

    @property
    def error(self) -> float:
        """The median error."""
        return float(np.median(np.abs(self.held_out))) if self.held_out else float("nan")


def rows_of(links: Links, folder: Path) -> list[Row]:
    """The rows that the links are fitted to."""
    own = [row for row in collective_rows(folder, links.device) if links.group in (0, row.group)]
    if not links.like:
        return own
    others = collective_rows(folder, links.like)
    return own + [
        row for row in others if row.group > links.beyond and row.kind not in links.unlike
    ]


def _algorithms(kind: str, links: Links) -> list[Algorithm]:
    """An algorithm for each protocol.

    On a level of one group size, the bytes that cross (an all-reduce: a tree's).
    """
    ring, *others = TABLE["nccl"][kind]
    if links.group:
        crossing = {"all_reduce": 1.0, "all_to_all": links.members**2 / links.group}.get(
            kind, ring.traffic(links.group)
        )
        return [
            replace(ring, steps=lambda n: 0.0, traffic=lambda n: crossing, own=lambda n: 0.0)
        ] * len(PROTOCOLS)
    switch = [a for a in others if a.feature == "in_switch"] if links.switch else []
    return [ring] * len(PROTOCOLS) + switch * len(SWITCHED)


def fit_kind(
    kind: str, rows: Sequence[Row], links: Links, inside: Mapping[str, Sequence[float]]
) -> Result:
    """The protocols of one collective, from the rows not held out.

    `inside`: seconds of starts on the levels inside.
    """
    alike = (
        GATHERS if links.group and kind in GATHERS else (kind,)
    )  # too few rows to tell them apart
    usable = [row for row in rows if row.kind in alike and row.usual]

    def fitted(fold: int) -> Fitted:
        seen = Points.of([row for row in usable if row.fold != fold])
        solution = fit(
            seen, _algorithms(kind, links), bandwidth=links.bandwidth, least=inside.get(kind, ())
        )
        return solution.ordered() if links.group and not inside else solution

    whole = fitted(0)
    unseen = [row for row in usable if row.held_out]
    points = Points.of(unseen)
    crossed: list[tuple[float, float]] = []
    for fold in range(1, FOLDS):
        own = [
            row
            for row in usable
            if row.fold == fold and row.device == links.device and row.kind == kind
        ]
        if own:
            predicted = fitted(fold).seconds(Points.of(own))
            crossed += [
                (row.nbytes, float(np.log(row.seconds / seconds)))
                for row, seconds in zip(own, predicted, strict=True)
            ]
    errors = list(whole.seconds(points) / points.seconds - 1)
    return Result(
        kind=kind, fitted=whole, rows=len(usable) - len(unseen), held_out=errors, crossed=crossed
    )


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def us(seconds: float) -> dict[str, Any]:
    """A time as a figure."""
    return {"value": _round(seconds * 1e6), "unit": "us"}


def rate(per_second: float) -> dict[str, Any]:
    """A rate as a figure."""
    return {"value": _round(per_second / 1e9), "unit": "GB/s"}


def share(part: float) -> dict[str, Any]:
    """A share of a rate as a figure, at most 1."""
    return {"value": min(_round(part), 1.0), "unit": "1"}


def said(result: Result, device: str) -> dict[str, Any]:
    """The source of a protocol's figures."""
    source = f"{result.kind} on {device}: {result.rows} rows of {ROWS}"
    return {
        "source": source,
        "kind": "fitted",
        "error": _round(result.error),
        "rows": len(result.held_out),
    }


def _named(fitted: Fitted, links: Links) -> list[tuple[str, int]]:
    """Protocols that are the fastest for some size and group, from most seconds per byte to least.

    A level of one group names all of its protocols.
    """
    if links.group:
        return list(zip(PROTOCOLS, range(len(PROTOCOLS)), strict=True))
    sizes = np.geomspace(64, 2**35, 60)
    used: set[int] = set()
    for group in (2, 4, 8, 16, 36, 72):
        used |= set(
            fitted.fastest(
                Points(group=np.full(len(sizes), group), nbytes=sizes, seconds=sizes)
            ).tolist()
        )
    ordered = sorted(used, key=lambda number: -fitted.per_byte[number])
    named = []
    for names, numbers in (
        (PROTOCOLS, range(len(PROTOCOLS))),
        (SWITCHED, range(len(PROTOCOLS), len(fitted.overhead))),
    ):
        here = [number for number in ordered if number in numbers]
        named += list(zip(names[len(names) - len(here) :], here, strict=True))
    return named


def protocols_of(result: Result, links: Links, inside: Sequence[float]) -> list[dict[str, Any]]:
    """The protocols of one collective in the form of a file.

    `inside`: seconds of each start on the levels inside.
    """
    fitted = result.fitted
    written = []
    for name, number in _named(fitted, links):
        switched = name in SWITCHED
        start = fitted.overhead[number] - (inside[number] if inside else 0.0)
        copy = {} if switched or links.group else {"copy_bandwidth": rate(1 / fitted.own_per_byte)}
        written.append(
            {
                "name": name,
                "algorithms": ["in-switch"]
                if switched
                else RUN_BY.get(result.kind, ["ring", "tree"]),
                "collectives": [result.kind] if switched else COLLECTIVES[result.kind],
                "overhead": us(max(start, 0.0)),
                "latency": us(0.0 if links.group else fitted.latency[number]),
                "efficiency": share(1 / fitted.per_byte[number] / links.bandwidth),
                **copy,
                "said": said(result, links.measured(result.kind)),
            }
        )
    return written


def residuals_of(result: Result) -> dict[str, dict[str, float]]:
    """The residuals of small and of large collectives in the form of a level.

    Of all together if there are few.
    """
    groups: dict[str, list[float]] = {left_by(result.kind, nbytes): [] for nbytes in (1, BIG)}
    for nbytes, value in result.crossed:
        groups[left_by(result.kind, nbytes)].append(value)
    every = [value for values in groups.values() for value in values]
    chosen = {name: values if len(values) >= FEW else every for name, values in groups.items()}
    return {
        name: asdict(Residual.of(np.array(values)))
        for name, values in chosen.items()
        if len(values) >= FEW
    }


def links_file(
    links: Links, results: Sequence[Result], inside: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The contents of a file of links."""
    gathered = next(result for result in results if result.kind == "all_gather")
    own = said(gathered, links.measured(gathered.kind))
    last = int(np.argmin(gathered.fitted.per_byte))
    return {
        "bandwidth": {**rate(links.bandwidth), "source": links.sheet, "kind": "data sheet"},
        "latency": {
            **us(gathered.fitted.overhead.min() if links.group else gathered.fitted.latency[last]),
            **own,
        },
        "efficiency": {**share(1 / gathered.fitted.per_byte[last] / links.bandwidth), **own},
        "features": ["in_switch"] if links.switch else [],
        **({"shared_by": links.members} if links.inside else {}),
        "protocols": [
            one
            for result in results
            for one in protocols_of(result, links, inside.get(result.kind, ()))
        ],
        "residuals": {
            name: left for result in results for name, left in residuals_of(result).items()
        },
    }


def write(name: str, contents: dict[str, Any]) -> Path:
    """Write a file of links, one protocol a line."""
    path = SHIPPED / f"{name}.json"
    residuals = contents.get("residuals", {})
    head = {key: value for key, value in contents.items() if key not in ("protocols", "residuals")}
    lines = ",\n    ".join(json.dumps(one) for one in contents["protocols"])
    left = ",\n    ".join(f'"{name}": {json.dumps(one)}' for name, one in residuals.items())
    body = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in head.items())
    tail = f',\n  "residuals": {{\n    {left}\n  }}' if residuals else ""
    path.write_text(
        f'{{\n{body},\n  "protocols": [\n    {lines}\n  ]{tail}\n}}\n', encoding="utf-8"
    )
    return path
