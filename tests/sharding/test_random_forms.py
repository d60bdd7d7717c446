"""Operators that draw by counter draw on shards what they draw on one device, whatever the layout,
and what torch draws on the average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir import Ref
from autopar.runtime.lowering.localise import localise
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.proof import Sample, execution, prove
from autopar.runtime.random_numbers.draw_state import Draws, drawing
from autopar.sharding.layout import S
from autopar.sharding.program import Decision
from tests.sharding.samples import f, n

from . import samples, samples_of_layers, samples_of_numbers

SDPA = "aten.scaled_dot_product_attention.default"


def _drawing() -> Iterator[Sample]:
    """Calls that draw, from the samples of all rules and some more."""
    families = (samples.attention, samples_of_numbers.chances, samples_of_layers.layers)
    yield from (case for family in families for case in family() if _draws(case))
    for kind, given in (
        ("dropout", {"p": 0.4, "train": True}),
        ("feature_dropout", {"p": 0.4, "train": True}),
        ("rand_like", {}),
        ("randn_like", {}),
        ("randint_like", {"high": 9}),
    ):
        first = function_of(f"aten.{kind}.default")._schema.arguments[0].name  # type: ignore[attr-defined]
        yield samples.sample(f"aten.{kind}.default", **{first: f(12, 12, 6)}, **given)
    yield samples.sample("aten.native_dropout.default", input=n(6, 12), p=0.3, train=True)
    keys = {"key": n(6, 6, 12, 2), "value": n(6, 6, 12, 6)}
    masked = {"attn_mask": n(6, 1, 6, 12), "dropout_p": 0.4}
    yield samples.sample(SDPA, "masked", query=n(6, 6, 6, 2), **keys, **masked)
    yield samples.sample(
        SDPA, "three dims", query=n(6, 6, 2), key=n(6, 12, 2), value=n(6, 12, 6), dropout_p=0.4
    )
    yield samples.sample(
        SDPA,
        "grouped",
        query=n(2, 12, 6, 2),
        key=n(2, 6, 6, 2),
        value=n(2, 6, 6, 6),
        dropout_p=0.4,
        enable_gqa=True,
    )


def _draws(case: Sample) -> bool:
    """Whether the operator gives other results from call to call."""
    actual = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results = function_of(case.kind)(
            **arguments_of(
                function_of(case.kind), case.operator.attributes, case.values, torch.device("cpu")
            )
        )
        actual.append(results[0] if isinstance(results, tuple | list) else results)
    return not torch.equal(*actual)


CASES = list(_drawing())


def _whole(case: Sample) -> LocalCall:
    tensors = case.graph.tensors
    operator = case.operator
    return LocalCall(
        operator=operator,
        decision=Decision.cold(operator, 0),
        inputs=tuple(tensors[name] for name in operator.inputs),
        outputs=tuple(tensors[name] for name in operator.outputs),
        mesh=(),
        coordinate=(),
    )


def _run(case: Sample, draws: Draws) -> Tensor:
    local = localise(_whole(case))
    with drawing(draws):
        results = local.function(
            **arguments_of(local.function, local.attributes, case.values, torch.device("cpu"))
        )
    output: Tensor = results[0] if isinstance(results, tuple | list) else results
    return output


def test_all_that_draw_are_here() -> None:
    assert len({case.kind for case in CASES}) >= 35


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_follow_the_draws_alone(case: Sample) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = _run(case, Draws(seed=1, step=2))
    assert torch.equal(torch.get_rng_state(), state), (
        "torch's generator goes on as if nothing had been drawn"
    )
    torch.rand(1)
    assert torch.equal(first, _run(case, Draws(seed=1, step=2)))
    assert not torch.equal(first, _run(case, Draws(seed=1, step=3)))
    assert not torch.equal(first, _run(case, Draws(seed=2, step=2)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_draws_are_those_of_torch(case: Sample) -> None:
    torch.manual_seed(1)
    actual = _run(case, Draws(seed=5, exact=True))
    torch.manual_seed(1)
    function = function_of(case.kind)
    wanted = function(
        **arguments_of(function, case.operator.attributes, case.values, torch.device("cpu"))
    )
    torch.testing.assert_close(actual, wanted[0] if isinstance(wanted, tuple | list) else wanted)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_split_equals_the_whole(
    case: Sample, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of the rules, with the operator on one device drawing by counter, too."""
    told = localise(_whole(case))

    def alone(kind: str) -> Any:
        def call(**given: Any) -> Any:
            return told.function(
                **{
                    **told.attributes,
                    **given,
                    **({"device": torch.device("cpu")} if "device" in told.attributes else {}),
                }
            )

        return call

    monkeypatch.setattr(execution, "function_of", alone)
    with drawing(Draws(seed=3, step=1)):
        assert prove(case, mesh) > 0


def test_what_draws_inside_itself_is_not_split() -> None:
    case = next(case for case in CASES if case.kind == "aten.poisson.default")
    split = Decision(options=(), rule=None, inputs=((S(0),),), outputs=((S(0),),))
    with pytest.raises(PlanError, match="cannot be drawn in parts"):
        localise(replace(_whole(case), decision=split, mesh=(2,), coordinate=(0,)))


MOMENTS = (
    "uniform",
    "exponential",
    "normal_functional",
    "geometric",
    "rand_like",
    "randn_like",
    "bernoulli.p",
    "alpha_dropout",
    "random.to",
)


@pytest.mark.parametrize("name", MOMENTS)
def test_the_average_is_that_of_torch(name: str) -> None:
    """Mean and deviation of many numbers, in whatever way they are drawn."""
    case = next(case for case in CASES if case.kind.startswith(f"aten.{name}"))
    (given,) = case.values
    first = next(name for name, value in case.operator.attributes.items() if isinstance(value, Ref))
    large = samples.sample(
        case.kind,
        **{**case.operator.attributes, first: torch.full((200, 500), 0.25, dtype=given.dtype)},
    )
    drawn = _run(large, Draws(seed=1)).double()
    wanted = _run(large, Draws(exact=True)).double()
    scale = float(wanted.std()) / drawn.numel() ** 0.5
    assert abs(float(drawn.mean() - wanted.mean())) < 6 * scale
    assert abs(float(drawn.std() / wanted.std()) - 1) < 0.03
