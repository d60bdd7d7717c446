"""Backends of ranks that catch what does not match, where a test asks for them."""

from __future__ import annotations

import pytest

from autopar.runtime.launch.rank_process import BACKEND
from autopar.runtime.strict_backend import NAME
from autopar.runtime.torch_versions import CHECKS_COLLECTIVES


@pytest.fixture
def strict_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forked inside the test verify every collective among each other before it runs."""
    if CHECKS_COLLECTIVES:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")


@pytest.fixture
def strict_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forked inside the test are held to the rules of NCCL."""
    monkeypatch.setenv(BACKEND, NAME)
