"""Collectives that do not match among the ranks are caught in every test here."""

from __future__ import annotations

import pytest

from autopar.runtime.torch_versions import CHECKS_COLLECTIVES


@pytest.fixture(autouse=True)
def strict_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks started inside the test verify every collective among each other before it runs, on one
    thread each.
    """
    if CHECKS_COLLECTIVES:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
