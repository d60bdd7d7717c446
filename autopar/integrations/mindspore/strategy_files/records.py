"""The contents of a MindSpore strategy checkpoint, and its two forms.

The protobuf form has the fields of `node_strategy.proto`:

    ParallelStrategyMap    1 current_stage    2 parallel_strategy_item*    3 parallel_layout_item*
    ParallelStrategyItem   1 node_name        2 parallel_strategys {
                                                1 stage, 2 parallel_strategy* {1 dim*}}
    ParallelLayoutItem     1 param_name       2 parallel_layouts {
                                                1 dev_matrix {1 dim*}, 2 tensor_map {1 dim*},
                                                3 param_split_shape, 4 indices_offset, 5 field,
                                                6 opt_weight_shard_step, 7 opt_weight_shard_size}

The JSON form has the same names; items are keyed by node and by parameter, and a layout also has
its tensor_shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import PlanError, UsageError
from autopar.file_limits import STRATEGY_BYTES
from autopar.outputs import write_whole
from autopar.reading import read_bytes

from . import wire

ENDINGS = (".json", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStrategy:
    """The number of parts of each dim of every input of an operator, and its stage."""

    cuts: tuple[tuple[int, ...], ...]
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """A parameter's device matrix and tensor map.

    Its state is divided over `size` devices, `step` apart.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...]
    shape: tuple[int, ...] = ()
    field: int = 0
    step: int = 0
    size: int = 0
    manual: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of parts of each dim."""
        last = len(self.device_matrix) - 1
        if any(not -1 <= place <= last for place in self.tensor_map):
            raise PlanError(
                f"tensor map {self.tensor_map} names none of the places of the device matrix "
                f"{self.device_matrix}"
            )
        # A tensor map counts the places of the device matrix from the right; -1 is a whole dim.
        return tuple(
            1 if place == -1 else self.device_matrix[last - place] for place in self.tensor_map
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    """The contents of a strategy checkpoint: operators by node name, layouts by parameter name."""

    operators: Mapping[str, OperatorStrategy] = field(default_factory=dict)
    parameters: Mapping[str, ParameterLayout] = field(default_factory=dict)
    stage: int = 0


# Unknown fields are ignored, since other versions of MindSpore may write more than these.
class _Strategy(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    stage: int = Field(default=0, ge=0)
    parallel_strategy: tuple[tuple[int, ...], ...]


class _Layout(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    dev_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...]
    tensor_shape: tuple[int, ...] = ()
    field: int = 0
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0
    param_split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    current_stage: int = Field(default=0, ge=0)
    parallel_strategy_item: dict[str, _Strategy] = {}
    parallel_layout_item: dict[str, _Layout] = {}


def read_strategies(path: str | Path) -> Strategies:
    """Read a strategy checkpoint in either form; `PlanError` with the fault for any other file."""
    path = Path(path)
    data = read_bytes(path, STRATEGY_BYTES, what="strategy checkpoint", error=PlanError)
    if not data:
        raise PlanError(f"{path}: the file is empty")
    # No protobuf file begins with a brace, which would be the tag of a field 15.
    try:
        strategies = (
            strategies_of_json(data) if data.lstrip()[:1] == b"{" else strategies_of_protobuf(data)
        )
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    for name, strategy in strategies.operators.items():
        if any(count < 1 for one in strategy.cuts for count in one):
            raise PlanError(f"{path}: the strategy of {name!r} has a number of parts below 1")
    if any(
        count < 1 for layout in strategies.parameters.values() for count in layout.device_matrix
    ):
        raise PlanError(f"{path}: a device matrix has a size below 1")
    return strategies


def write_strategies(strategies: Strategies, path: str | Path) -> None:
    """Write a strategy checkpoint, whole or not at all: `.json`, or `.ckpt` in protobuf."""
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise UsageError(
            f"{path}: a strategy checkpoint ends with .json, or with .ckpt for protobuf"
        )
    write_whole(path, to_json(strategies) if path.suffix == ".json" else to_protobuf(strategies))


# --- JSON ---


def strategies_of_json(data: bytes) -> Strategies:
    """Read the strategies of a file in JSON."""
    try:
        read = _File.model_validate(json.loads(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PlanError(
            f"not a strategy checkpoint of MindSpore: {where}: {first['msg']}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}") from error
    operators = {
        n: OperatorStrategy(cuts=s.parallel_strategy, stage=s.stage)
        for n, s in read.parallel_strategy_item.items()
    }
    parameters = {
        name: ParameterLayout(
            device_matrix=one.dev_matrix,
            tensor_map=one.tensor_map,
            shape=one.tensor_shape,
            field=one.field,
            step=one.opt_weight_shard_step,
            size=one.opt_weight_shard_size,
            manual=_pairs(one.param_split_shape, one.indices_offset),
        )
        for name, one in read.parallel_layout_item.items()
    }
    return Strategies(operators=operators, parameters=parameters, stage=read.current_stage)


def _pairs(shapes: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if len(shapes) != len(offsets):
        raise PlanError(f"a split by fields has {len(shapes)} sizes and {len(offsets)} offsets")
    return tuple(zip(shapes, offsets, strict=True))


def to_json(saved: Strategies) -> str:
    """The JSON form."""
    layouts: dict[str, dict[str, object]] = {}
    for name, one in saved.parameters.items():
        layouts[name] = {
            "dev_matrix": one.device_matrix,
            "tensor_map": one.tensor_map,
            "tensor_shape": one.shape,
            "field": one.field,
            "opt_weight_shard_step": one.step,
            "opt_weight_shard_size": one.size,
        }
        if one.manual:
            layouts[name] |= {
                "param_split_shape": [s for s, _ in one.manual],
                "indices_offset": [o for _, o in one.manual],
            }
    strategies = {
        n: {"stage": s.stage, "parallel_strategy": s.cuts} for n, s in saved.operators.items()
    }
    data = {
        "current_stage": saved.stage,
        "parallel_strategy_item": strategies,
        "parallel_layout_item": layouts,
    }
    return json.dumps(data, indent=1) + "\n"


# --- protobuf ---


def strategies_of_protobuf(data: bytes) -> Strategies:
    """Read the strategies of a file in protobuf."""
    operators: dict[str, OperatorStrategy] = {}
    parameters: dict[str, ParameterLayout] = {}
    stage = 0
    known = False
    for entry in wire.fields_of(data):
        if entry[0] == 1 and isinstance(entry[1], int):
            stage = entry[1]
            known = True
        elif entry[0] in (2, 3):
            known = True
            name, body = _named(wire.message(entry))
            if entry[0] == 2:
                operators[name] = _strategy(body)
            else:
                parameters[name] = _layout(body)
    if not known:
        raise PlanError(
            "not a strategy checkpoint of MindSpore: it has none of the fields of "
            "node_strategy.proto"
        )
    return Strategies(operators=operators, parameters=parameters, stage=stage)


def _named(data: bytes) -> tuple[str, bytes]:
    """The name and the body of an item."""
    parts = {entry[0]: wire.message(entry) for entry in wire.fields_of(data) if entry[0] in (1, 2)}
    if set(parts) != {1, 2}:
        raise PlanError("a strategy checkpoint holds an item without its name or its contents")
    return wire.text(parts[1]), parts[2]


def _strategy(data: bytes) -> OperatorStrategy:
    stage = 0
    cuts = []
    for entry in wire.fields_of(data):
        if entry[0] == 1 and isinstance(entry[1], int):
            stage = entry[1]
        elif entry[0] == 2:
            cuts.append(wire.numbers(wire.message(entry)))
    return OperatorStrategy(cuts=tuple(cuts), stage=stage)


def _layout(data: bytes) -> ParameterLayout:
    lists: dict[int, tuple[int, ...]] = {}
    single = dict.fromkeys((5, 6, 7), 0)
    for entry in wire.fields_of(data):
        number, value = entry
        if number in (1, 2, 3, 4):
            lists[number] = wire.numbers(wire.message(entry))
        elif number in single and isinstance(value, int):
            single[number] = value - 2**64 if value >= 2**63 else value
    layout = ParameterLayout(
        device_matrix=lists.get(1, ()),
        tensor_map=lists.get(2, ()),
        field=single[5],
        step=single[6],
        size=single[7],
    )
    return replace(layout, manual=_pairs(lists.get(3, ()), lists.get(4, ())))


def to_protobuf(strategies: Strategies) -> bytes:
    """The protobuf form; it has no place for the shapes of parameters."""
    out = [wire.number_field(1, strategies.stage)]
    for name, strategy in strategies.operators.items():
        cuts = b"".join(wire.bytes_field(2, wire.numbers_message(one)) for one in strategy.cuts)
        body = wire.number_field(1, strategy.stage) + cuts
        out.append(
            wire.bytes_field(2, wire.bytes_field(1, name.encode()) + wire.bytes_field(2, body))
        )
    for name, layout in strategies.parameters.items():
        lists = (
            layout.device_matrix,
            layout.tensor_map,
            [s for s, _ in layout.manual],
            [o for _, o in layout.manual],
        )
        body = b"".join(
            wire.bytes_field(number, wire.numbers_message(one))
            for number, one in enumerate(lists, 1)
        )
        body += b"".join(
            wire.number_field(number, one)
            for number, one in ((5, layout.field), (6, layout.step), (7, layout.size))
        )
        out.append(
            wire.bytes_field(3, wire.bytes_field(1, name.encode()) + wire.bytes_field(2, body))
        )
    return b"".join(out)
