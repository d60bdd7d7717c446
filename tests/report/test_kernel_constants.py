"""`autopar cluster show` leaves out no constant that a price is made of."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from autopar.costmodel import load_cluster, presets
from autopar.report.clusters import show_parts
from autopar.report.kernel_constants import kernel_tables
from autopar.report.tables import Table


@pytest.mark.parametrize("name", presets())
def test_every_figure_is_shown_with_its_source(name: str) -> None:
    cluster = load_cluster(name)
    shown = {
        row[0]: row[2]
        for part in show_parts(cluster)
        if isinstance(part, Table) and part.title == "Device"
        for row in part.rows
    }
    stated = {
        where.removeprefix("device.") for where in cluster.sources if where.startswith("device.")
    }
    assert stated <= set(shown)
    assert all(shown[where] for where in stated)


def test_every_constant_of_the_kernels_in_use_is_shown() -> None:
    device = load_cluster("dgx-h100").device
    kernels = device.kernels
    assert kernels is not None
    fits, constants = kernel_tables(device)
    assert {row[0] for row in fits.rows} >= set(kernels.fits)
    values = {(row[0], row[1]): row[2] for row in constants.rows}
    form = kernels.products["bfloat16"]
    for name, value in asdict(form).items():
        if isinstance(value, float | int):
            assert values["products bfloat16", name] == f"{value:.4g}"
    assert values["products bfloat16", "sustained.warm"] == f"{form.sustained.warm:.4g}"
    assert (
        values["products bfloat16", "libraries.vllm bfloat16.factor"]
        == f"{form.libraries['vllm bfloat16'].factor:.4g}"
    )
    assert values["attention fa3", "burst.rate"] == f"{kernels.attention['fa3'].burst.rate:.4g}"
    assert ("grouped moe_torch_flow_cutlass bfloat16", "prologue") in values and values[
        "all", "units"
    ] == "132"


def test_a_fit_is_shown_with_its_interval_or_a_dash() -> None:
    fits, _ = kernel_tables(load_cluster("p3.16xlarge").device)
    rows = {row[0]: row for row in fits.rows}
    assert " to " in rows["products float16"][7] and rows["products float16"][1] == "fitted"
    assert rows["attention flash_attention"][1:8] == ("assumed", "0", "0", "-", "-", "-", "-")
    assert kernel_tables(load_cluster("local-cpu").device) == []
