"""Certificates prove the bounds of their solutions without a search, and corrupted ones are
refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from certificate import Certificate, check
from certifying import certify
from search_graphs import clique, layered_graph, random_graph

from autopar.search import CostGraph, Infeasible, NoAssignment, Solution, solve
from autopar.search.elimination import conditioning
from autopar.search.solvers.dynamic_programming import eliminate_variables


def proven(graph: CostGraph, solution: Solution) -> Certificate:
    """The certificate of a solution, valid as it is."""
    certificate = certify(graph, solution)
    verdict = check(graph, certificate)
    assert verdict.valid, verdict.reason
    assert verdict.cost == solution.cost
    return certificate


def rejected(graph: CostGraph, certificate: Certificate, reason: str) -> None:
    verdict = check(graph, certificate)
    assert not verdict.valid and reason in verdict.reason, verdict


LAYERS = layered_graph(layers=6, operators=4, size=5, hub=3)


@pytest.fixture(scope="module")
def exact() -> Certificate:
    return proven(LAYERS, solve(LAYERS))


@pytest.fixture(scope="module")
def limited() -> Certificate:
    return proven(LAYERS, solve(LAYERS, memory_limit=0.8 * solve(LAYERS).memory))


def test_messages_prove_the_optimum(exact: Certificate) -> None:
    assert exact.kind == "messages" and exact.messages
    assert check(LAYERS, exact).bound == pytest.approx(solve(LAYERS).cost, rel=1e-12)


def test_wrong_figures_are_refused(exact: Certificate) -> None:
    cheaper = 0.99 * exact.cost
    rejected(LAYERS, replace(exact, cost=cheaper), "the choices cost")
    rejected(LAYERS, replace(exact, cost=cheaper, bound=cheaper), "the choices cost")
    rejected(LAYERS, replace(exact, bound=1.01 * exact.cost), "above the cost")
    other = [(choice + 1) % size for choice, size in zip(exact.choices, LAYERS.sizes, strict=True)]
    rejected(LAYERS, replace(exact, choices=tuple(other)), "the choices cost")
    rejected(
        LAYERS,
        replace(exact, choices=tuple(other), cost=LAYERS.cost(other), bound=1.05 * exact.bound),
        "of the bound",
    )
    rejected(LAYERS, replace(exact, choices=exact.choices[1:]), "not of this graph")


def test_every_raised_message_is_refused(exact: Certificate) -> None:
    for number, message in enumerate(exact.messages):
        for raised in (
            message + 1e-3,
            np.where(
                np.arange(message.size).reshape(message.shape) == message.argmin(), 1e9, message
            ),
        ):
            messages = (*exact.messages[:number], raised, *exact.messages[number + 1 :])
            verdict = check(LAYERS, replace(exact, messages=messages))
            assert verdict.bound <= exact.cost * (1 + 1e-12), "a bound that is none"
    raised = tuple(message + 1e-3 for message in exact.messages)
    rejected(LAYERS, replace(exact, messages=raised, bound=exact.bound), "of the bound")
    last = exact.numbers[-1]
    roof = (*exact.messages[:last], exact.messages[last] + 1.0, *exact.messages[last + 1 :])
    assert check(LAYERS, replace(exact, messages=roof)).bound <= exact.cost * (1 + 1e-12)


def test_a_lowered_message_proves_less(exact: Certificate) -> None:
    first = exact.numbers[0]
    lowered = (*exact.messages[:first], exact.messages[first] - 1.0, *exact.messages[first + 1 :])
    rejected(LAYERS, replace(exact, messages=lowered), "of the bound")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"order": ()}, "of the bound"),
        ({"order": (0,)}, "each of the"),
        ({"messages": ()}, "a message is missing"),
        ({"kind": "faith"}, "unknown kind"),
        ({"price": 1.0}, "asks for a limit"),
        ({"price": -1.0, "limit": 1.0}, "asks for a limit"),
        ({"split": (99,)}, "not of the graph"),
        ({"substitutes": (None,)}, "substitutes of 1"),
    ],
)
def test_what_is_malformed_is_refused(
    exact: Certificate, change: dict[str, Any], reason: str
) -> None:
    rejected(LAYERS, replace(exact, **change), reason)


def test_a_price_of_a_byte(limited: Certificate) -> None:
    assert limited.kind in ("messages+price", "enumeration") and limited.price > 0.0
    priced = replace(limited, kind="messages+price", bound=check(LAYERS, limited).bound)
    assert check(LAYERS, priced).valid
    rejected(LAYERS, replace(priced, price=2.0 * limited.price), "of the bound")
    rejected(LAYERS, replace(priced, limit=0.9 * limited.limit if limited.limit else None), "bytes")
    rejected(replace(LAYERS, memory=None), priced, "tables of memory")


def test_no_certificate_proves_more_than_the_optimum() -> None:
    """Whatever is done to the messages, the proven bound is one."""
    draw = np.random.default_rng(0)
    for seed in range(60):
        graph = random_graph(seed)
        try:
            solution = solve(graph)
        except NoAssignment:
            continue
        certificate = proven(graph, solution)
        for _ in range(4):
            messages = tuple(
                message + draw.normal(0.0, 0.3, message.shape) for message in certificate.messages
            )
            assert (
                check(graph, replace(certificate, messages=messages)).bound <= solution.cost + 1e-9
            )


@pytest.mark.parametrize("limit", [None, 18.0])
def test_split_variables(limit: float | None) -> None:
    split = 0
    for seed in range(24):
        graph = clique(count=6, size=3, seed=seed, forbidden=0.1 * (seed % 2))
        try:
            solution = eliminate_variables(graph, memory_limit=limit, max_entries=9)
        except Infeasible:
            continue
        certificate = proven(graph, solution)
        split += len(certificate.split) > 0
    assert split > 10


def test_dropped_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "PRUNE_WORK", 0.0)
    dropped = 0
    for seed in range(120):
        graph = random_graph(seed)
        for limit in (None, 12.0):
            try:
                solution = eliminate_variables(graph, memory_limit=limit, max_entries=1 << 20)
            except ValueError:
                continue
            certificate = proven(graph, solution)
            for v, instead in enumerate(certificate.substitutes):
                if instead is None:
                    continue
                dropped += 1
                swapped = np.full_like(
                    instead, int(np.flatnonzero(instead == np.arange(len(instead)))[-1])
                )
                lie = (*certificate.substitutes[:v], swapped, *certificate.substitutes[v + 1 :])
                verdict = check(graph, replace(certificate, substitutes=lie))
                assert not verdict.valid or verdict.bound <= solution.cost + 1e-9
    assert dropped > 50


def test_substitutes_that_lead_nowhere() -> None:
    graph = CostGraph(sizes=(2,), unary=(np.zeros(2),), edges={})
    certificate = proven(graph, solve(graph))
    rejected(graph, replace(certificate, substitutes=(np.array([1, 0]),)), "no choice that is kept")
    rejected(graph, replace(certificate, substitutes=(np.array([5, 0]),)), "not choices")
    rejected(graph, replace(certificate, substitutes=(np.array([-1, 1]),)), "of the bound")


@pytest.mark.parametrize("method", ["exhaustive", "recursive_programming", "integer_program"])
def test_every_method_has_one(method: str) -> None:
    for seed in range(20):
        graph = random_graph(seed)
        try:
            proven(graph, solve(graph, method=method))
        except NoAssignment:
            continue


def test_the_bound_of_a_clique_that_is_too_wide() -> None:
    graph = clique(count=8, size=3, seed=3)
    solution = eliminate_variables(graph, memory_limit=None, max_entries=27)
    certificate = proven(graph, solution)
    assert certificate.split
    rejected(graph, replace(certificate, split=certificate.split[1:]), "")
