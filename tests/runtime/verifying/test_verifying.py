"""Shardings of others: each of those that are wrong is found, with operator, shape and size, and a
hundred right ones pass.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import verify_cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from verify_cases import (
    RIGHT,
    WRONG,
    Case,
    ignored,
    right_data_parallel,
    right_loss_parallel,
    right_mlp,
    right_registered,
)

from autopar.cli import run
from autopar.errors import RunError, UsageError
from autopar.runtime.launch import run_ranks
from autopar.runtime.verifying import Verdict, case_named, verify
from autopar.runtime.verifying.case import made_case


def verdict(case: Case, ranks: int = 2) -> Verdict:
    return verify(made_case("case", case, ranks))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    make, operator = WRONG[name]
    actual = verdict(make())
    assert not actual.ok
    assert any(one.operator.startswith(operator) for one in actual.findings), [
        one.sentence for one in actual.findings
    ]
    first = actual.findings[0]
    assert first.shape is not None and first.sentence.startswith(first.operator)


def _ignored_error() -> float:
    """How far torch's loss of a split batch with ignored labels is from that of the whole."""
    case = made_case("ignored", ignored(), 2)
    assert case.loss is not None
    whole = case.loss(case.module(*case.inputs), *case.inputs).detach()
    mesh = init_device_mesh("cpu", case.mesh)
    case.parallelize(case.module, mesh)
    split = case.loss(case.module(*case.inputs), *case.inputs).detach()
    assert isinstance(split, DTensor)
    return float((split.full_tensor() - whole).abs())


def test_ignored_labels_are_judged_by_what_torch_does() -> None:
    actual = verdict(ignored())
    if run_ranks(_ignored_error, 2)[0] < 1e-6:
        assert actual.ok, [one.sentence for one in actual.findings]
    else:
        assert not actual.ok and actual.findings[0].operator.startswith("aten.nll_loss")


def test_counted_twice_is_said_so() -> None:
    actual = verdict(WRONG["experts"][0]())
    assert {one.what for one in actual.findings} == {"it is 2 times that of the whole"}
    assert all("experts" in one.operator for one in actual.findings) and actual.gradients == 6
    assert {one.what for one in verdict(WRONG["experts"][0](), 3).findings} == {
        "it is 3 times that of the whole"
    }


@pytest.mark.parametrize(
    "make",
    [
        right_loss_parallel,
        right_data_parallel,
        right_registered,
        lambda: right_mlp("megatron", "gelu", True, True),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_right_passes(make: verify_cases.Callable[[], Case], ranks: int) -> None:
    actual = verdict(make(), ranks)
    assert actual.ok, [one.sentence for one in actual.findings]
    assert actual.gradients > 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", RIGHT, ids=lambda given: "-".join(map(str, given)))
def test_a_hundred_right_plans_pass(arguments: tuple[str, str, bool, bool]) -> None:
    actual = verdict(right_mlp(*arguments))
    assert actual.ok, [one.sentence for one in actual.findings]


def test_right_plans_are_a_hundred() -> None:
    assert len(RIGHT) == 100


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the gradient of experts"):
        run(["verify", "verify_cases:wrong_experts"])
    assert "is 2 times that of the whole" in capsys.readouterr().out
    assert run(["verify", "verify_cases:right_loss_parallel", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] and printed["findings"] == [] and printed["mesh"] == [2]
    styles = tmp_path / "styles.json"
    styles.write_text('{"up": "colwise", "down": "rowwise"}')
    assert run(["verify", "verify_cases:built", "--tp-plan", str(styles)]) == 0
    styles.write_text('{"up": "colwise"}')
    with pytest.raises(RunError, match="raises"):
        run(["verify", "verify_cases:built", "--tp-plan", str(styles)])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("verify_cases", "not of the form"),
        ("no_such_module:f", "cannot be imported"),
        ("verify_cases:right_mpl", "Perhaps you meant 'right_mlp'"),
        ("verify_cases:built", "returned tuple; it must be a function"),
    ],
)
def test_cases_that_are_none(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        case_named(text)


def test_styles_that_torch_has_not(tmp_path: Path) -> None:
    styles = tmp_path / "styles.json"
    for text, why in (
        ('{"up": "packed_colwise"}', "unknown style"),
        ("[]", "holds no styles"),
        ("{", "not JSON"),
    ):
        styles.write_text(text)
        with pytest.raises(UsageError, match=why):
            run(["verify", "verify_cases:built", "--tp-plan", str(styles)])
    with pytest.raises(UsageError, match="2 ranks or more"):
        run(["verify", "verify_cases:wrong_experts", "--nproc", "1"])
