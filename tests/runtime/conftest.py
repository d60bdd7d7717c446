"""Collectives that do not match are caught, where a test asks for it."""

from __future__ import annotations

import pytest


@pytest.fixture
def strict_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forked inside the test verify every collective among each other before it runs."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
