"""ONNX models that cannot be written out, counted or run: one sentence and exit code 3, whatever
the file holds.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

import autopar
from autopar.cli import run
from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions, load_model

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]


def call(name: str, x: str = "x", y: str = "y") -> NodeProto:
    """A node of the domain of local functions."""
    return helper.make_node(name, [x], [y], domain="own")


def local(name: str, *nodes: NodeProto) -> FunctionProto:
    return helper.make_function("own", name, ["x"], ["y"], list(nodes), OPSETS)


def model(
    *nodes: NodeProto, functions: Sequence[FunctionProto] = (), stored: Sequence[TensorProto] = ()
) -> ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in ("x", "y")]
    graph = helper.make_graph(list(nodes), "g", ends[:1], ends[1:], initializer=list(stored))
    return helper.make_model(graph, functions=list(functions), opset_imports=OPSETS)


def relu(x: str = "x", y: str = "y", name: str = "") -> NodeProto:
    return helper.make_node("Relu", [x], [y], name=name)


def doubling(count: int) -> ModelProto:
    """Functions each of which calls the one before twice."""
    functions = [local("f0", relu())]
    functions += [
        local(f"f{i}", call(f"f{i - 1}", y="t"), call(f"f{i - 1}", x="t")) for i in range(1, count)
    ]
    return model(call(f"f{count - 1}"), functions=functions)


def row(count: int) -> ModelProto:
    """Functions each of which calls the one before once."""
    return model(
        call(f"f{count - 1}"),
        functions=[local("f0", relu())]
        + [local(f"f{i}", call(f"f{i - 1}")) for i in range(1, count)],
    )


def large() -> ModelProto:
    ends = [("x", [4, 2, 8]), ("w", [1, 32, 8]), ("r", [1, 32, 8]), ("y", None)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends]
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=2**62)
    return helper.make_model(
        helper.make_graph([lstm], "g", infos[:3], infos[3:]), opset_imports=OPSETS
    )


def renamed(old: bytes, build: Callable[[], ModelProto]) -> bytes:
    """The file with a name in it that is no UTF-8."""
    content = build().SerializeToString()
    assert old in content
    return content.replace(old, b"\xff\xfe" + old[2:])


REFUSED: dict[str, tuple[Callable[[], ModelProto | bytes], str]] = {
    "calls itself": (
        lambda: model(call("a"), functions=[local("a", call("a"))]),
        "own::a calls itself",
    ),
    "a circle": (
        lambda: model(call("a"), functions=[local("a", call("b")), local("b", call("a"))]),
        "calls itself",
    ),
    "twice": (
        lambda: model(call("a"), functions=[local("a", relu()), local("a", relu())]),
        "two local functions called own::a",
    ),
    "doubling": (lambda: doubling(32), "2147483648 operators"),
    "a long row": (lambda: row(2000), "200 times in a row"),
    "hidden size": (large, "the file says"),
    "input name": (lambda: renamed(b"longer", lambda: model(relu("longer"))), "not UTF-8"),
    "node name": (lambda: renamed(b"longer", lambda: model(relu(name="longer"))), "not UTF-8"),
    "function name": (
        lambda: renamed(
            b"longer", lambda: model(call("longer"), functions=[local("longer", relu())])
        ),
        "not UTF-8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    build, words = REFUSED[name]
    built = build()
    path = tmp_path / "m.onnx"
    path.write_bytes(built if isinstance(built, bytes) else built.SerializeToString())
    with pytest.raises(ModelError, match=words):
        run(["plan", str(path), "--devices", "2", "--cluster", "local-cpu", "--quiet"])


def test_functions_within_the_bounds_are_written_out(tmp_path: Path) -> None:
    for built, count in ((doubling(5), 16), (row(100), 1)):
        graph = load_model(built, ModelOptions(train=False)).graph
        # A chain is one pointwise operator.
        told = [f"{op.kind} {op.attributes}" for op in graph.operators]
        assert sum(text.count("aten.relu.default") for text in told) == count


def test_missing_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planning says that the file is missing; a run does not go on with random weights."""
    stored = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[8, 8], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", "lost.bin"), ("offset", "0"), ("length", "256")):
        stored.external_data.add(key=key, value=value)
    path = tmp_path / "m.onnx"
    plan = tmp_path / "plan.json"
    path.write_bytes(
        model(helper.make_node("MatMul", ["x", "w"], ["y"]), stored=[stored]).SerializeToString()
    )
    planning = [
        "plan",
        str(path),
        "--devices",
        "2",
        "--cluster",
        "local-cpu",
        "--no-compare",
        "--json",
        "-o",
        str(plan),
    ]
    run(planning)
    (note,) = [
        text
        for text in json.loads(capsys.readouterr().out)["summary"]["notes"]
        if "missing" in text
    ]
    assert "lost.bin is missing: it holds the tensor 'w'; planning needs no weights" in note
    for extra in ([], ["--check"]):
        with pytest.raises(
            ModelError,
            match=r"lost\.bin is missing: it holds the tensor 'w'; put it beside the model",
        ):
            run(["run", str(plan), "--model", str(path), *extra])
    (tmp_path / "lost.bin").write_bytes(bytes(256))
    run(planning)
    assert "is missing" not in capsys.readouterr().out


def test_a_file_without_data_is_drawn_from_the_seed() -> None:
    loaded = load_model(
        model(
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            stored=[TensorProto(name="w", data_type=1, dims=[8, 8])],
        ),
        ModelOptions(),
    )
    assert not loaded.notes
    assert loaded.weights is not None and list(loaded.weights()) == []


def test_no_traceback_and_exit_code(tmp_path: Path) -> None:
    """The command itself, once: what the table above raises is one line, and weights that no memory
    holds are, too.
    """
    wide = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 2**20]) for name in ("x", "y")
    ]
    stored = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**20, 2**20])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        wide[:1],
        wide[1:],
        initializer=[stored],
    )
    path = tmp_path / "m.onnx"
    plan = tmp_path / "plan.json"
    path.write_bytes(helper.make_model(graph, opset_imports=OPSETS).SerializeToString())
    autopar.plan(path, devices=2, cluster="local-cpu", memory=1e14, stages=1).save(plan)
    command = [sys.executable, "-m", "autopar", "run", str(plan), "--model", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=_small
    )
    assert done.returncode == ModelError.exit_code
    assert "cannot be drawn" in done.stderr and "Traceback" not in done.stderr


def _small() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
