"""Forked processes: how many there may be."""

from __future__ import annotations

import multiprocessing

import pytest

from autopar import forking as module
from autopar.analysis.searches.side_by_side import side_by_side
from autopar.errors import UsageError
from autopar.forking import cores, processes


def test_the_number_is_that_of_the_cores_or_the_wanted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processes(None) == cores() and processes(3) == 3
    # All ranks of a machine may plan at the same time.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert processes(None) == 1
    with pytest.raises(UsageError, match="jobs is 0, it must be at least 1"):
        processes(0)


def test_who_may_have_no_children_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with multiprocessing.get_context("fork").Pool(1) as daemons:
        assert daemons.apply(processes, (3,)) == 1
    assert list(side_by_side(lambda _: processes(3), [0, 1], 2)) == [1, 1]
    monkeypatch.setattr(module, "FORKS", False)
    assert processes(3) == 1
