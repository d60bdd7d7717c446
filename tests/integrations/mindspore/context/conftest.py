"""Every test of the context begins and ends without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import autopar


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    autopar.reset_auto_parallel_context()
    yield
    autopar.reset_auto_parallel_context()
