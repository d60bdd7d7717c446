"""Operators in the content of a plan's file, which has them by region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def operator(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry of an operator."""
    return next(held["operators"][name] for held in _regions(data) if name in held["operators"])


def decide(data: dict[str, Any], name: str, strategy: list[str]) -> None:
    """Give an operator, and the region that it leads, another strategy."""
    operator(data, name)["strategy"] = strategy
    for held in _regions(data):
        if held["lead"] == name:
            held["strategy"] = strategy


def rename(data: dict[str, Any], name: str, other: str) -> None:
    """Give an operator, and the region that it leads, another name."""
    for region, held in list(data["operators"].items()):
        if name in held["operators"]:
            held["operators"][other] = held["operators"].pop(name)
        if held["lead"] == name:
            held["lead"] = other
            data["operators"][other] = data["operators"].pop(region)


def first(data: dict[str, Any]) -> str:
    """The name of the first operator of the model."""
    places = {
        name: one["place"] for held in _regions(data) for name, one in held["operators"].items()
    }
    return min(places, key=lambda name: places[name])


def _regions(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from data["operators"].values()
