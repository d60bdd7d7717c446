"""Rules that a test registers are gone after it; torch runs on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar.sharding.rules import RULES


@pytest.fixture(autouse=True)
def kept_rules() -> Iterator[None]:
    """The table of rules as it was."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Threads cost more than they give here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
