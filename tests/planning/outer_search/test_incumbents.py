"""Whole graphs are solved anew only where that can still matter."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.planning.outer_search.evaluator import Played
from autopar.planning.outer_search.incumbents import Incumbents
from autopar.planning.outer_search.unlike_layers import UnlikeLayers
from autopar.planning.outer_search.whole_programs import Whole, WholePrograms
from autopar.search import Infeasible


def _program(seconds: float) -> Any:
    return SimpleNamespace(seconds=seconds)


def _played(name: str, seconds: float, promise: float) -> Played:
    solved: Any = SimpleNamespace(candidate=name, promise=promise)
    return Played(solved=solved, seconds=seconds, limited=True)


def _incumbents(anew: Mapping[str, float], tried: list[str]) -> Incumbents:
    """Incumbents whose whole programs take as long as folded ones, or `anew` with unlike layers."""

    def solved_anew(solved: Any) -> Any:
        tried.append(solved.candidate)
        if solved.candidate not in anew:
            raise Infeasible(2.0, 1.0)
        return _program(anew[solved.candidate])

    whole = SimpleNamespace(
        program=lambda played: Whole(_program(played.seconds), may_gain=played.limited),
        solved_anew=solved_anew,
    )
    return Incumbents(cast(WholePrograms, whole))


def test_the_last_incumbents_are_solved_anew() -> None:
    tried: list[str] = []
    incumbents = _incumbents({"first": 0.5, "near": 0.97, "best": 0.99}, tried)
    # The bound of the certain one says that nothing is gained.
    for one in (
        _played("first", 3.0, 0.5),
        _played("near", 1.005, 0.9),
        _played("certain", 1.003, 0.9999),
        _played("best", 1.0, 0.9),
    ):
        incumbents.note(one)
        incumbents.settle()
    assert not tried
    assert incumbents.best == 1.0
    incumbents.improve()
    assert tried == ["best", "near"]
    assert [program.seconds for program in incumbents.programs[:3]] == [0.97, 0.99, 1.0]
    assert incumbents.best == 0.97
    # Each is solved anew once.
    incumbents.improve()
    assert tried == ["best", "near"]


def test_the_search_s_own_solution_is_left_where_unlike_layers_do_not_fit() -> None:
    tried: list[str] = []
    incumbents = _incumbents({}, tried)
    incumbents.challenge(_played("best", 1.0, 0.5))
    incumbents.improve()
    assert tried == ["best"]
    assert incumbents.best == 1.0


def _misfits(monkeypatch: pytest.MonkeyPatch, share: float) -> tuple[UnlikeLayers, list[float]]:
    """Unlike layers that need a share of the bytes of equal ones, and what is tried of them."""
    incumbents = _incumbents({}, [])
    tried: list[float] = []

    def challenge(self: Incumbents, played: Played) -> Infeasible | None:
        needed = played.solved.promise
        tried.append(needed)
        if needed * share > 100.0:
            return Infeasible(needed * share, 100.0)
        self.played.insert(0, played)
        return None

    monkeypatch.setattr(Incumbents, "challenge", challenge)
    unlike = UnlikeLayers(incumbents)
    for needed in (105.0, 104.0, 115.0, 101.0, 102.0):
        unlike.look_at(_played("any", 1.0, needed).solved, Infeasible(needed, 100.0))
    return unlike, tried


def test_unlike_layers_wait_where_a_failure_says_that_they_hardly_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first needs 98 % of the bytes of equal layers, so that one of 101 may fit."""
    _, tried = _misfits(monkeypatch, 0.98)
    assert tried == [105.0, 101.0]


def test_unlike_layers_are_tried_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    unlike, tried = _misfits(monkeypatch, 1.0)
    assert tried == [105.0]
    unlike.try_waiting()
    assert tried == [105.0, 104.0, 101.0, 102.0]
    unlike.try_waiting()
    assert len(tried) == 4
