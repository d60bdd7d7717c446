"""The fit of a dispatcher's kernels finds the constants that made its rows."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fit_dispatch import Measured, fitted, measured


def test_constants_are_found_again_although_links_bound_some_calls() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([4e-5, 4e-7, 7e-11, 3e-11])
    terms = np.column_stack(
        [rng.uniform(10, 1000, 200), rng.uniform(1e5, 1e7, 200), rng.uniform(1e6, 4e7, 200)]
    )
    wire = np.where(np.arange(200) % 4 == 0, 1.5 * (terms @ truth[1:]), 0.0)
    seconds = truth[0] + np.maximum(terms @ truth[1:], wire)
    calls = Measured(terms=terms, wire=wire, seconds=seconds)
    assert fitted([calls]) == pytest.approx(truth, rel=0.02)
    assert np.abs(calls.errors(truth)).max() < 1e-12


def test_rows_become_terms_by_way_and_nodes() -> None:
    row = {
        "tokens_per_rank": "1024",
        "hidden": "1280",
        "topk": "2",
        "experts": "8",
        "gpus": "8",
        "nodes": "1",
        "sms": "20",
        "dispatch_s": "2e-4",
        "combine_s": "3e-4",
    }
    one = measured([row], "combine", 4.5e11)
    assert one.terms[0] == pytest.approx([1024 / 20, 1024 * 2560 / 20, 1024 * 2560 * 2 / 20])
    far = {**row, "gpus": "16", "experts": "16", "nodes": "2", "dispatch_notify_s": "1e-5"}
    across = measured([far], "dispatch", 4.5e11)
    assert across.seconds[0] == pytest.approx(2.1e-4) and across.terms.shape == (1, 1)
    assert across.terms[0, 0] == pytest.approx(1024 * 1320 * 2 / 20)
