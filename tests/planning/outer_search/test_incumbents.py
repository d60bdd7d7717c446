"""Whole graphs are solved anew only where that can still matter."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from autopar.planning.outer_search.evaluator import Played
from autopar.planning.outer_search.incumbents import Incumbents
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
