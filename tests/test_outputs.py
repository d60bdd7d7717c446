"""Outputs go to regular files only: inputs, devices and pipes stay as they are, and links are
followed.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from autopar.cli import run
from autopar.cli.files import check_outputs
from autopar.errors import UsageError
from autopar.outputs import check_output, write_whole

PLAN = ("--devices", "2", "--cluster", "local-cpu", "--quiet", "--no-compare", "--stages", "1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose weight lies in another file."""
    stored = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[8, 8], data_location=TensorProto.EXTERNAL
    )
    stored.external_data.add(key="location", value="weights.bin")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        ends[:1],
        ends[1:],
        initializer=[stored],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    )
    (tmp_path / "weights.bin").write_bytes(bytes(256))
    return path


def _itself(folder: Path) -> Path:
    return folder / "m.onnx"


def _link(folder: Path) -> Path:
    (folder / "link.json").symlink_to(folder / "m.onnx")
    return folder / "link.json"


def _hard_link(folder: Path) -> Path:
    os.link(folder / "m.onnx", folder / "hard.json")
    return folder / "hard.json"


def _weights(folder: Path) -> Path:
    return folder / "weights.bin"


@pytest.mark.parametrize("output", [_itself, _link, _hard_link, _weights])
@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_what_is_read_is_not_written(
    model: Path, output: Callable[[Path], Path], option: str
) -> None:
    before = {path: path.read_bytes() for path in model.parent.iterdir()}
    with pytest.raises(UsageError, match="the command reads it"):
        run(["plan", str(model), *PLAN, option, str(output(model.parent))])
    assert {path: path.read_bytes() for path in before} == before


def test_the_plan_reused_is_not_written(model: Path) -> None:
    plan = str(model.parent / "plan.json")
    run(["plan", str(model), *PLAN, "-o", plan])
    for extra in (["--reuse", plan], ["--strategy-load", plan]):
        with pytest.raises(UsageError, match="the command reads it"):
            run(["plan", str(model), *PLAN, *extra, "-o", plan])


def test_modules_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    given = argparse.Namespace(model="own.net:build", loss="own.net:loss", rules=["own.rules"])
    for name in ("own/net.py", "own/rules.py"):
        (tmp_path / name).write_text("")
        with pytest.raises(UsageError, match="the command reads it"):
            check_outputs(given, name)
    check_outputs(given, "own/plan.json")


def test_two_outputs_are_two_files(model: Path) -> None:
    with pytest.raises(UsageError, match="two outputs"):
        run(
            [
                "plan",
                str(model),
                *PLAN,
                "-o",
                str(model.parent / "a"),
                "--trace",
                str(model.parent / "." / "a"),
            ]
        )


def test_no_device_and_no_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/null"), pipe):
        for write in (check_output, lambda path: write_whole(path, "text")):
            with pytest.raises(UsageError, match="no regular file"):
                write(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and stat.S_ISFIFO(pipe.stat().st_mode)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    target = tmp_path / "in" / "plan.json"
    link = tmp_path / "link.json"
    loop = tmp_path / "loop"
    link.symlink_to(target)
    loop.symlink_to(loop)
    for text in ("one", "two"):
        write_whole(link, text)
        assert link.is_symlink() and target.read_text() == text
    with pytest.raises(UsageError, match="cannot be written"):
        write_whole(loop, "text")


def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o600)
    write_whole(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
