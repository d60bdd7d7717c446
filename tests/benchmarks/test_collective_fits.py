"""The fit of collectives: it finds what made the figures, holds points out by their name, and
writes what a cluster reads.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.cluster.residual import left_by
from autopar.costmodel.collectives.backends import TABLE
from benchmarks.fitting import link_fits
from benchmarks.fitting.collective_rows import Points, Row, collective_rows, devices
from benchmarks.fitting.collective_scores import collective_scores, predicted
from benchmarks.fitting.envelope import fit
from benchmarks.fitting.link_fits import LINKS, fit_kind, links_file

PRESETS = Path(__file__).resolve().parents[2] / "costmodel" / "presets"
SIZES = [2.0**k for k in range(9, 30)]
HEADER = "op,kind,dtype,gpus,bytes,seconds,trap\n"


def made(group: int, nbytes: float) -> float:
    """Seconds of an all-gather whose protocols are known."""
    lines = ((4e-6, 1e-6, 5e9), (8e-6, 1e-6, 2e11), (2e-5, 3e-6, 4e11))
    return min(
        o + s * (group - 1) + nbytes * ((group - 1) / group / r + 1 / group / 1e12)
        for o, s, r in lines
    )


def rows_made() -> list[Row]:
    return [row_made(group, nbytes) for group in (2, 4, 8) for nbytes in SIZES]


def row_made(group: int, nbytes: float) -> Row:
    return Row(
        kind="all_gather", group=group, nbytes=nbytes, seconds=made(group, nbytes), summed=True
    )


def test_the_fit_finds_what_made_the_figures_for_groups_it_has_not_seen() -> None:
    seen = [row for row in rows_made() if not row.held_out]
    fitted = fit(Points.of(seen), [TABLE["nccl"]["all_gather"][0]] * 3, bandwidth=4.5e11)
    group = np.array([3, 6, 16, 16])
    nbytes = np.array([1e3, 1e6, 1e4, 1e9])
    points = Points(group=group, nbytes=nbytes, seconds=nbytes)
    expected = [made(int(n), x) for n, x in zip(group, nbytes, strict=True)]
    assert fitted.seconds(points) == pytest.approx(expected, rel=0.05)


def test_points_are_held_out_as_a_whole_and_by_name() -> None:
    rows = rows_made()
    out = {(row.group, row.nbytes) for row in rows if row.held_out}
    assert 0.1 < len(out) / len(rows) < 0.35
    assert all(replace(row, seconds=1.0, summed=False).held_out == row.held_out for row in rows)


def test_rows_with_a_trap_or_of_other_libraries_are_left_out(tmp_path: Path) -> None:
    lines = [
        "all_gather,nccl,half,8,1024,1e-5,",
        "all_gather,nccl,half,8,1024,1e-5,doubtful",
        "all_reduce,custom_allreduce,half,8,1024,1e-5,",
        "alltoall,nccl,int8,2,2048,2e-5,",
    ]
    with gzip.open(tmp_path / "collectives_h100_sxm.csv.gz", "wt") as file:
        file.write(HEADER + "\n".join(lines) + "\n")
    assert devices(tmp_path) == ("h100_sxm",)
    actual = [(row.kind, row.group, row.summed) for row in collective_rows(tmp_path, "h100_sxm")]
    assert actual == [("all_gather", 8, True), ("all_to_all", 2, False)]
    assert devices(tmp_path / "empty") == () and collective_scores(tmp_path, "no such device") == []
    scores = {one.kind: one.n for one in collective_scores(tmp_path, "h100_sxm")}
    assert scores == {
        left_by(row.kind, row.nbytes): 1
        for row in collective_rows(tmp_path, "h100_sxm")
        if row.held_out
    }


def test_what_is_written_is_what_was_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = next(links for links in LINKS if links.name == "nvlink-a100")
    results = [fit_kind("all_gather", rows_made(), replace(links, bandwidth=4.5e11), {})]
    monkeypatch.setattr(link_fits, "SHIPPED", tmp_path)
    path = link_fits.write("made", links_file(replace(links, bandwidth=4.5e11), results, {}))
    level = {"name": "nvlink", "size": 8, **json.loads(path.read_text(encoding="utf-8"))}
    file = tmp_path / "cluster.json"
    preset = json.loads((PRESETS / "dgx-a100.json").read_text(encoding="utf-8"))
    file.write_text(json.dumps({**preset, "levels": [level]}), encoding="utf-8")
    cluster = load_cluster(file)
    for group, nbytes in ((2, 4096.0), (8, 2.0**20), (8, 2.0**28)):
        row = row_made(group, nbytes)
        priced, low, high = predicted(row, cluster)
        assert priced == pytest.approx(
            float(results[0].fitted.seconds(Points.of([row]))[0]), rel=1e-3
        )
        assert priced == pytest.approx(row.seconds, rel=0.1) and low <= high
    assert cluster.sources["nvlink.simple.all_gather.overhead"].error == pytest.approx(
        results[0].error, abs=1e-4
    )
