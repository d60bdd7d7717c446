"""Plans as files: the same text twice, round trips, strict matching, reuse, and files that are
none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar import api
from autopar.errors import AutoparError, PlanError
from autopar.frontends.load import LoadedModel
from autopar.plan import Plan
from autopar.sharding.schedule import UNIT_BYTES
from tests.plan_files import decide
from tests.planning.modules import Layer, loaded, perceptron, plan_of, program_of, transformer

OPTIONS: dict[str, Any] = {"devices": 4, "cluster": "dgx-h100"}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded(transformer(2, 64, 4), 8, 16, 64)


@pytest.fixture(scope="module")
def plan(model: LoadedModel) -> Plan:
    return plan_of(model, **OPTIONS, mesh=(2, 2))


@pytest.fixture(scope="module")
def moving(model: LoadedModel) -> Plan:
    """A plan that redistributes activations."""
    return plan_of(model, **OPTIONS, mesh=(2, 2), scheme="megatron")


def test_the_same_request_gives_the_same_text(model: LoadedModel, plan: Plan) -> None:
    assert (
        plan_of(loaded(transformer(2, 64, 4), 8, 16, 64), **OPTIONS, mesh=(2, 2)).to_json()
        == plan.to_json()
    )


SCRIPT = """
import sys
from tests.planning.modules import loaded, perceptron, plan_of
sys.stdout.write(plan_of(loaded(perceptron(64, 256, 64), 8, 64), devices=4).to_json())
"""


def test_the_text_does_not_depend_on_the_hash_seed() -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)}
    text = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=root,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert text == plan_of(loaded(perceptron(64, 256, 64), 8, 64), devices=4).to_json()


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.to_json() == plan.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_loaded_plan_is_not_searched(
    model: LoadedModel, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.save(tmp_path / "plan.json")

    def no_search(*args: object, **options: object) -> Plan:
        raise AssertionError("a loaded plan is used as it is")

    monkeypatch.setattr(api, "fastest_plan", no_search)
    assert plan_of(model, **OPTIONS, load=tmp_path / "plan.json") == plan
    with pytest.raises(PlanError, match="for 4 devices, not 8"):
        plan_of(model, cluster="dgx-h100", devices=8, load=plan)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: loaded(transformer(3, 64, 4), 8, 16, 64),
            ["parameter '2.q.weight' is not in the plan"],
        ),
        (
            lambda: loaded(transformer(1, 64, 4), 8, 16, 64),
            ["operator '1.q/linear'", "is not in the model", "parameter '1.q.weight'"],
        ),
        (
            lambda: loaded(transformer(2, 64, 4), 16, 16, 64),
            ["operator '0.q/linear'", "other shapes or attributes"],
        ),
        (
            lambda: loaded(transformer(2, 128, 4), 8, 16, 128),
            ["planned as float32 [64, 64]", "is float32 [128, 128]"],
        ),
        (
            lambda: loaded(transformer(2, 64, 4), 8, 16, 64, dtype="bfloat16"),
            ["is bfloat16 [64]", "planned as float32 [64]"],
        ),
        (
            lambda: loaded(perceptron(64, 64), 8, 64),
            ["operator '0.q/linear' (aten.linear.default) is not in the model"],
        ),
        (
            lambda: loaded(nn.Sequential(*transformer(2, 64, 4), nn.Tanh()), 8, 16, 64),
            ["operator '2/tanh' (aten.tanh.default) is not in the plan"],
        ),
    ],
    ids=[
        "a layer more",
        "a layer less",
        "another batch",
        "another width",
        "another dtype",
        "another model",
        "an activation more",
    ],
)
def test_what_does_not_match_is_listed(
    plan: Plan, other: Callable[[], LoadedModel], words: list[str]
) -> None:
    graph = other().graph
    actual = plan.differences(graph)
    assert all(any(word in line for line in actual) for word in words), actual
    with pytest.raises(
        PlanError, match=r"does not match the model \(--reuse keeps what matches\)"
    ) as caught:
        plan.require_match(graph)
    assert caught.value.exit_code == 5


def renamed() -> LoadedModel:
    """The same model with its second layer under another name."""
    with torch.device("meta"):
        module = nn.Sequential()
        module.add_module("0", Layer(64, 4))
        module.add_module("extra", Layer(64, 4))
    return loaded(module, 8, 16, 64)


@pytest.mark.parametrize(
    ("other", "kept"),
    [(renamed, "0"), (lambda: loaded(transformer(3, 64, 4), 8, 16, 64), "01")],
    ids=["a layer renamed", "a layer added"],
)
def test_reuse_keeps_what_matches(plan: Plan, other: Callable[[], LoadedModel], kept: str) -> None:
    """Started from another plan than the search would find, so that what is kept is kept because it
    was asked for.
    """
    model = loaded(transformer(2, 64, 4), 8, 16, 64)
    odd = plan_of(model, **OPTIONS, mesh=(2, 2), scheme="megatron")
    fresh = other()
    chosen = plan_of(fresh, **OPTIONS, reuse_from=odd)
    assert chosen.mesh == odd.mesh
    same = [name for name in odd.operators if name[0] in kept]
    assert same and all(
        chosen.operators[name].strategy == odd.operators[name].strategy for name in same
    )
    stored = [name for name in odd.parameters if name[0] in kept]
    assert stored and all(
        chosen.parameters[name].storage == odd.parameters[name].storage for name in stored
    )
    free = plan_of(fresh, **OPTIONS, mesh=(2, 2))
    assert any(chosen.operators[name].strategy != free.operators[name].strategy for name in same)
    program_of(chosen, fresh)


def test_reuse_of_another_number_of_devices_is_refused(model: LoadedModel, plan: Plan) -> None:
    with pytest.raises(PlanError, match="for 4 devices, not 8"):
        plan_of(model, cluster="dgx-h100", devices=8, reuse_from=plan)


# --- files that are no plan, or that lie ---


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def _decided(to: list[Any]) -> Callable[[dict[str, Any]], None]:
    return lambda data: decide(data, "0.q/linear", to)


BROKEN: dict[str, Callable[[dict[str, Any]], None]] = {
    "no schema": _drop("schema"),
    "another schema": _set("schema", to="onnx"),
    "no version": _drop("version"),
    "a later version": _set("version", to=5),
    "a field more": _set("surprise", to=1),
    "no mesh": _drop("mesh"),
    "a mesh of text": _set("mesh", to="2x2"),
    "an axis of size 0": _set("mesh", 0, "size", to=0),
    "an axis of size -2": _set("mesh", 0, "size", to=-2),
    "two axes of one name": _set("mesh", 0, "name", to="gpu1"),
    "operators in a list": _set("operators", to=[]),
    "a strategy of numbers": _decided(to=[1, 2]),
    "a mode": _set("model", "mode", to="dream"),
    "a step in words": _set("predicted", "step", to="fast"),
    "two stages": _set("stages", to=2),
    "a plan in a list": _set("provenance", to=[]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_no_plan(name: str, plan: Plan, tmp_path: Path) -> None:
    data = json.loads(plan.to_json())
    BROKEN[name](data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"plan"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": "autopar-plan"}',
        b'{"schema": NaN}',
        b"\x00" * 100,
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "null",
        "number",
        "text",
        "no utf-8",
        "deep",
        "bare",
        "nan",
        "zeros",
    ],
)
def test_bytes_that_are_no_plan(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(path)


def test_a_truncated_plan_at_any_place(plan: Plan, tmp_path: Path) -> None:
    text = plan.to_json()
    path = tmp_path / "plan.json"
    for end in range(0, len(text) - 2, len(text) // 40):
        path.write_text(text[:end])
        with pytest.raises(PlanError, match="not a strategy checkpoint"):
            Plan.load(path)


def test_files_that_are_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "gone.json")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as stream:
        stream.truncate(300 * 2**20)
    with pytest.raises(PlanError, match="larger than 256 MiB"):
        Plan.load(huge)


LYING: dict[str, Callable[[dict[str, Any]], None]] = {
    "a factor that is not": _decided(to=["zz", "R"]),
    "too few axes": _decided(to=["R"]),
    "too many axes": _decided(to=["R", "R", "R"]),
    "no strategy": _decided(to=[]),
    "an operator is missing": _drop("operators", "0.q"),
    "a parameter is missing": _drop("parameters", "0.q.weight"),
    "an output is missing": _set("outputs", to={}),
    "a bad layout": _set("parameters", "0.q.weight", "storage", to="S0 X"),
    "a short layout": _set("parameters", "0.q.weight", "storage", to="S0"),
    "a dim that is not": _set("parameters", "0.q.weight", "storage", to="S7 R"),
    "parts that do not divide": _set("parameters", "0.q.weight", "storage", to="S0/7 R"),
    "parts beyond reason": _set(
        "parameters", "0.q.weight", "storage", to="S0/99999999999999999999 R"
    ),
    "a partial parameter": _set("parameters", "0.q.weight", "storage", to="P R"),
    "a share of a parameter": _set("parameters", "0.q.weight", "storage", to="B R"),
    "a partial output": _set("outputs", "1/add.1:0", to="P P"),
    "a partial loss": _set("outputs", "loss/mean_square.0:0", to="P P"),
    "an output that is not": _set("outputs", "nobody:0", to="R R"),
    "no redistributions": _set("redistributions", to={}),
}


@pytest.mark.parametrize("name", LYING)
def test_plans_that_lie(name: str, model: LoadedModel, moving: Plan) -> None:
    """The file is well formed, and the model's fingerprint is right, but the decisions are not."""
    data = json.loads(moving.to_json())
    assert plan_of(model, **OPTIONS, load=Plan.model_validate(data)) == moving
    LYING[name](data)
    with pytest.raises(PlanError) as caught:
        plan_of(model, cluster=None, load=Plan.model_validate(data))
    assert "devices" not in str(caught.value)


CHAINS = (
    "",
    "R R",
    "R R, R R",
    "R R, S0 S0",
    "R R, S9 R",
    "R R, Q R",
    "R R, S0",
    "S0 R, R R",
    "R R, P(max) R",
    "R R, S0/" + "9" * 5000 + " R",
)


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_that_lie(chain: str, model: LoadedModel, moving: Plan) -> None:
    data = json.loads(moving.to_json())
    name = next(name for name, chains in data["redistributions"].items() if chains)
    data["redistributions"][name] = [chain.split(", ") if chain else []]
    with pytest.raises(PlanError, match=r"redistribution|no single step|bad layout"):
        plan_of(model, cluster=None, load=Plan.model_validate(data))


# --- units ---


def test_units_are_read_back_and_old_files_have_the_default(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    held = plan.schedule
    assert (
        held.unit_bytes == held.in_stage.unit_bytes != UNIT_BYTES
        and held.prefetch == held.in_stage.prefetch == 1
    )
    assert Plan.load(path).schedule == held
    data = json.loads(path.read_text())
    data["schedule"] = {
        name: value
        for name, value in data["schedule"].items()
        if name not in ("unit_bytes", "prefetch")
    }
    path.write_text(json.dumps(data))
    old = Plan.load(path).schedule.in_stage
    assert (old.unit_bytes, old.prefetch) == (UNIT_BYTES, 1)
    for name, wrong in (("unit_bytes", 0), ("prefetch", -1)):
        path.write_text(json.dumps({**data, "schedule": {**data["schedule"], name: wrong}}))
        with pytest.raises(PlanError, match=name):
            Plan.load(path)


def test_a_plan_in_less_memory_has_smaller_units() -> None:
    """Weights of 256 MiB, stored split: of small units less is gathered at once, which takes no
    thriftier strategy.
    """
    wide = loaded(perceptron(*[2048] * 17), 512, 2048)
    options: dict[str, Any] = {
        "devices": 4,
        "mesh": (4,),
        "scheme": "zero3",
        "micro_batches": 1,
        "offload": "none",
        "recompute": "none",
    }
    free = plan_of(wide, **options)
    tight = plan_of(wide, **options, memory=0.9 * free.predicted.memory)
    assert (
        tight.schedule.unit_bytes < free.schedule.unit_bytes
        and tight.predicted.memory <= 0.9 * free.predicted.memory
    )
    assert tight.operators == free.operators and tight.parameters == free.parameters


def _integers(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of whole numbers in a document."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield place
    elif isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in pairs:
            yield from _integers(below, (*place, key))


@pytest.mark.parametrize("number", [10**30, 2**40, -1])
def test_absurd_numbers_end_in_one_error(tmp_path: Path, number: int) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = api.plan(module, torch.zeros(4, 8), devices=1, cluster="local-cpu")
    text = plan.to_json()
    outcomes = []
    for place in _integers(json.loads(text)):
        document = json.loads(text)
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = number
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document))
        try:
            api.parallelize(module, path)(torch.zeros(4, 8))
            outcomes.append("runs")
        except AutoparError:
            outcomes.append("refused")
    assert outcomes.count("refused") > len(outcomes) / 2
