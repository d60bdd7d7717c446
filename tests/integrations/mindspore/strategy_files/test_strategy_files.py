"""MindSpore's strategy checkpoints: both forms, another reader of protobuf as a witness, damaged
files, and the way to pins and back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, PlanError, UsageError
from autopar.integrations.mindspore.strategy_files import (
    OperatorStrategy,
    ParameterLayout,
    Strategies,
    read_strategies,
    write_strategies,
)
from autopar.integrations.mindspore.strategy_files.records import (
    strategies_of_json,
    strategies_of_protobuf,
    to_json,
    to_protobuf,
)
from autopar.plan import Plan

EXAMPLE = Strategies(
    operators={
        "MatMul_fc1.weight": OperatorStrategy(cuts=((4, 1), (1, 1)), stage=0),
        "MatMul_fc2.weight": OperatorStrategy(cuts=((1, 1), (4, 1)), stage=1),
    },
    parameters={
        "fc1.weight": ParameterLayout(
            device_matrix=(4,), tensor_map=(-1, -1), shape=(8, 12), step=1, size=4
        ),
        "fc2.weight": ParameterLayout(
            device_matrix=(2, 4), tensor_map=(0, -1), shape=(8, 8), field=3, manual=((4, 0), (4, 2))
        ),
    },
    stage=1,
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    autopar.reset_auto_parallel_context()
    yield
    autopar.reset_auto_parallel_context()


def _without_shapes(strategies: Strategies) -> Strategies:
    layouts = {
        n: ParameterLayout(
            device_matrix=p.device_matrix,
            tensor_map=p.tensor_map,
            field=p.field,
            step=p.step,
            size=p.size,
            manual=p.manual,
        )
        for n, p in strategies.parameters.items()
    }
    return Strategies(operators=strategies.operators, parameters=layouts, stage=strategies.stage)


@pytest.mark.parametrize("ending", ["json", "ckpt"])
def test_what_is_written_is_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"strategy.{ending}"
    write_strategies(EXAMPLE, path)
    assert read_strategies(path) == (EXAMPLE if ending == "json" else _without_shapes(EXAMPLE))


def test_json_has_the_names_of_mindspore() -> None:
    data = json.loads(to_json(EXAMPLE))
    assert data["current_stage"] == 1
    assert data["parallel_strategy_item"]["MatMul_fc1.weight"] == {
        "stage": 0,
        "parallel_strategy": [[4, 1], [1, 1]],
    }
    assert data["parallel_layout_item"]["fc2.weight"] == {
        "dev_matrix": [2, 4],
        "tensor_map": [0, -1],
        "tensor_shape": [8, 8],
        "field": 3,
        "opt_weight_shard_step": 0,
        "opt_weight_shard_size": 0,
        "param_split_shape": [4, 4],
        "indices_offset": [0, 2],
    }


_MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "Dims": [("dim", 1, "int64", True)],
    "ParallelStrategys": [("stage", 1, "uint32", False), ("parallel_strategy", 2, "Dims", True)],
    "ParallelStrategyItem": [
        ("node_name", 1, "string", False),
        ("parallel_strategys", 2, "ParallelStrategys", False),
    ],
    "ParallelLayouts": [
        *(
            (name, number, "Dims", True)
            for number, name in enumerate(
                ("dev_matrix", "tensor_map", "param_split_shape", "indices_offset"), 1
            )
        ),
        *(
            (name, number, "int32", False)
            for number, name in enumerate(
                ("field", "opt_weight_shard_step", "opt_weight_shard_size"), 5
            )
        ),
    ],
    "ParallelLayoutItem": [
        ("param_name", 1, "string", False),
        ("parallel_layouts", 2, "ParallelLayouts", False),
    ],
    "ParallelStrategyMap": [
        ("current_stage", 1, "uint32", False),
        ("parallel_strategy_item", 2, "ParallelStrategyItem", True),
        ("parallel_layout_item", 3, "ParallelLayoutItem", True),
    ],
}
"""node_strategy.proto, with one message for its lists of numbers, which are all alike on the wire.
"""


def _witness() -> Any:
    """The message as protobuf itself has it."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="node_strategy.proto", package="straspb", syntax="proto2"
    )
    types = {
        "int64": kinds.TYPE_INT64,
        "uint32": kinds.TYPE_UINT32,
        "int32": kinds.TYPE_INT32,
        "string": kinds.TYPE_STRING,
    }
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            own = (
                {"type": types[kind]}
                if kind in types
                else {"type": kinds.TYPE_MESSAGE, "type_name": f".straspb.{kind}"}
            )
            message.field.add(name=field, number=number, label=label, **own)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("straspb.ParallelStrategyMap")
    )


def test_protobuf_reads_what_we_write_and_we_what_it_writes() -> None:
    actual = _witness().FromString(to_protobuf(EXAMPLE))
    assert actual.current_stage == 1
    assert [item.node_name for item in actual.parallel_strategy_item] == list(EXAMPLE.operators)
    assert [
        list(one.dim)
        for one in actual.parallel_strategy_item[0].parallel_strategys.parallel_strategy
    ] == [[4, 1], [1, 1]]
    layout = actual.parallel_layout_item[1].parallel_layouts
    assert (
        list(layout.dev_matrix[0].dim) == [2, 4]
        and list(layout.tensor_map[0].dim) == [0, -1]
        and layout.field == 3
    )
    assert strategies_of_protobuf(actual.SerializeToString()) == _without_shapes(EXAMPLE)


def test_packed_numbers_and_unknown_fields_are_read() -> None:
    packed = (
        b"\x08\x00"
        + b"\x12\x0c"
        + b"\x0a\x01a"
        + b"\x12\x07"
        + b"\x08\x02"
        + b"\x12\x03\x0a\x01\x04"
        + b"\x7a\x02xy"
        + b"\x3d1234"
    )
    assert strategies_of_protobuf(packed) == Strategies(
        operators={"a": OperatorStrategy(cuts=((4,),), stage=2)}
    )


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (strategies_of_protobuf, strategies_of_json):
        with contextlib.suppress(PlanError):
            read(data)


@given(
    st.integers(min_value=0, max_value=len(to_protobuf(EXAMPLE)) - 1),
    st.integers(min_value=0, max_value=255),
)
@settings(max_examples=200)
def test_a_damaged_file_is_read_or_refused(place: int, value: int) -> None:
    data = bytearray(to_protobuf(EXAMPLE))
    data[place] = value
    for damaged in (bytes(data), bytes(data[:place])):
        with contextlib.suppress(PlanError):
            strategies_of_protobuf(damaged)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"{", "not JSON"),
        (b'{"parallel_strategy_item": {"a": 1}}', "parallel_strategy_item.a"),
        (
            b'{"parallel_strategy_item": {"a": {"parallel_strategy": [[0]]}}}',
            "number of parts below 1",
        ),
        (
            b'{"parallel_layout_item": {"a": {"dev_matrix": [0], "tensor_map": [0]}}}',
            "size below 1",
        ),
        (b"\x0b", "unknown type 3"),
        (b"\x12\xff\xff\xff\xff\x0f", "in the middle of a field"),
        (b"\x08\x00\x12\x03\x0a", "in the middle of a field"),
        (b"\x12\x02\x0a\x00", "without its name"),
        (b"\x80" * 11, "more than ten bytes"),
        (b"\x7a\x01x", "none of the fields"),
    ],
)
def test_what_is_no_strategy_checkpoint_is_refused(
    tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "strategy.ckpt"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=why):
        read_strategies(path)


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_strategies(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"\.json, or with \.ckpt"):
        write_strategies(EXAMPLE, tmp_path / "strategy.txt")


class Net(nn.Module):
    """Two layers, with parameters called as MindSpore's Dense has them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(12, 8, bias=False)
        self.fc2 = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        output: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return output


def _plan(**keys: Any) -> Plan:
    autopar.reset_auto_parallel_context()
    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4, **keys)
    return autopar.plan(Net(), (torch.randn(8, 12),), cluster="local-cpu", mode="infer")


@pytest.mark.parametrize("ending", ["json", "ckpt"])
def test_a_file_pins_the_operators_of_its_parameters(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"strategy.{ending}"
    layout = ParameterLayout(device_matrix=(4,), tensor_map=(0, -1), shape=(16, 8))
    write_strategies(
        Strategies(
            operators={"MatMul_net.fc2.weight": OperatorStrategy(cuts=((1, 1), (4, 1)))},
            parameters={"net.fc2.weight": layout},
        ),
        path,
    )
    plan = _plan(strategy_ckpt_load_file=str(path))
    assert (
        plan.operators["fc2/linear"].strategy == ("n",)
        and plan.parameters["fc2.weight"].storage == "S0"
    )
    assert _plan().operators["fc2/linear"].strategy != ("n",)


@pytest.mark.parametrize("ending", ["json", "ckpt"])
def test_a_layout_alone_says_how_a_parameter_is_stored(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"strategy.{ending}"
    write_strategies(
        Strategies(
            parameters={"fc2.weight": ParameterLayout(device_matrix=(4,), tensor_map=(-1, 0))}
        ),
        path,
    )
    plan = _plan(strategy_ckpt_load_file=str(path))
    assert {n: set(p.storage.split()) for n, p in plan.parameters.items()} == {
        "fc1.weight": {"R"},
        "fc2.weight": {"S1"},
    }


@pytest.mark.parametrize("ending", ["json", "ckpt", "plan.json"])
def test_what_a_plan_saves_makes_the_same_plan(tmp_path: Path, ending: str) -> None:
    net = Net()
    autopar.shard(net.fc1, ((1, 1), (4, 1)))
    path = tmp_path / f"strategy.{ending}"
    autopar.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=4, strategy_ckpt_save_file=str(path)
    )
    first = autopar.plan(net, (torch.randn(8, 12),), cluster="local-cpu", mode="infer")
    again = _plan(strategy_ckpt_load_file=str(path))
    assert {n: op.strategy for n, op in again.operators.items()} == {
        n: op.strategy for n, op in first.operators.items()
    }
    if ending != "plan.json":
        read = read_strategies(path)
        assert read.operators["MatMul_fc1.weight"].cuts == ((1, 1), (4, 1)) and read.parameters[
            "fc1.weight"
        ].parts == (4, 1)


@pytest.mark.parametrize(
    ("strategies", "why"),
    [
        (
            Strategies(
                parameters={"fc9.weight": ParameterLayout(device_matrix=(4,), tensor_map=(0, -1))}
            ),
            "fc9.weight",
        ),
        (Strategies(operators={"MatMul_fc9": OperatorStrategy(cuts=((1, 1),))}), "MatMul_fc9"),
        (
            Strategies(operators={"MatMul_fc1.weight": OperatorStrategy(cuts=((1, 1, 1),))}),
            "takes the inputs",
        ),
        (
            Strategies(
                parameters={"fc1.weight": ParameterLayout(device_matrix=(3,), tensor_map=(0, -1))}
            ),
            "do not divide",
        ),
        (
            Strategies(
                parameters={"fc1.weight": ParameterLayout(device_matrix=(4,), tensor_map=(2, -1))}
            ),
            "none of the places",
        ),
    ],
)
def test_what_does_not_match_the_model_is_refused(
    tmp_path: Path, strategies: Strategies, why: str
) -> None:
    path = tmp_path / "strategy.json"
    write_strategies(strategies, path)
    with pytest.raises(AutoparError, match=why):
        _plan(strategy_ckpt_load_file=str(path))


MATMUL = OperatorStrategy(cuts=((1, 1), (1, 1)))


@pytest.mark.parametrize(
    ("strategies", "why"),
    [
        (
            Strategies(operators={"MatMul_\x1b[31mfc9\u202e": MATMUL}),
            r"no parameters like\n  MatMul_\\x1b\[31mfc9\\u202e$",
        ),
        (
            Strategies(operators={f"MatMul_fc{n}.kernel": MATMUL for n in range(30_000)}),
            r"and 29980 more$",
        ),
        (
            Strategies(
                parameters={
                    "fc1.weight" * 10_000: ParameterLayout(device_matrix=(4,), tensor_map=(0, -1))
                }
            ),
            r"like\n  .{1000}$",
        ),
        (
            Strategies(
                operators={"MatMul_fc1.weight": OperatorStrategy(cuts=((2**62, 1), (1, 1)))}
            ),
            f"which {2**62} does not divide",
        ),
        (
            Strategies(operators={"MatMul_fc1.weight": OperatorStrategy(cuts=((1, 1),) * 9)}),
            "takes the inputs",
        ),
        (
            Strategies(
                operators={"MatMul_fc1.weight": OperatorStrategy(cuts=((1,) * 40_000, (1, 1)))}
            ),
            r"\(\(1, 1, .*\.\.\.$",
        ),
        (
            Strategies(
                parameters={
                    "fc1.weight": ParameterLayout(device_matrix=(2**62,), tensor_map=(0, -1))
                }
            ),
            "do not divide",
        ),
    ],
    ids=["terminal", "many", "long", "large", "inputs", "dims", "matrix"],
)
@pytest.mark.parametrize("ending", ["json", "ckpt"])
def test_hostile_files_are_refused_in_a_few_words(
    tmp_path: Path, strategies: Strategies, why: str, ending: str
) -> None:
    path = tmp_path / f"strategy.{ending}"
    write_strategies(strategies, path)
    with pytest.raises(AutoparError, match=why) as error:
        _plan(strategy_ckpt_load_file=str(path))
    assert len(str(error.value)) < 25_000 and "\x1b" not in str(error.value)


@pytest.mark.parametrize("ending", ["json", "ckpt"])
def test_files_are_written_whole_and_never_over_a_device(tmp_path: Path, ending: str) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / f"a.{ending}"
    link = tmp_path / f"link.{ending}"
    pipe = tmp_path / f"pipe.{ending}"
    real.write_text("before")
    link.symlink_to(real)
    write_strategies(EXAMPLE, link)
    assert link.is_symlink() and set(read_strategies(real).operators) == set(EXAMPLE.operators)
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="no regular file"):
        write_strategies(EXAMPLE, pipe)
    assert pipe.is_fifo() and sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["real", link.name, pipe.name]
    )
