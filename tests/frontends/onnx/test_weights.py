"""Reading weights lazily, and refusing external data that is missing, short or outside the model's
folder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autopar.errors import ModelError
from autopar.frontends.onnx import has_weights, import_onnx, load_weights

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def write(
    folder: Path,
    location: str = "w.bin",
    *,
    offset: int = 16,
    length: int | None = None,
    data: bool = True,
) -> Path:
    """A model whose weight lies in an external file."""
    tensor = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=WEIGHT.shape, data_location=TensorProto.EXTERNAL
    )
    for key, value in (
        ("location", location),
        ("offset", offset),
        ("length", WEIGHT.nbytes if length is None else length),
    ):
        tensor.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])],
        "external",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [tensor, numpy_helper.from_array(np.ones(4, np.float32), "b")],
    )
    path = folder / "model.onnx"
    path.write_bytes(
        helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8
        ).SerializeToString()
    )
    if data:
        (folder / "w.bin").write_bytes(bytes(16) + WEIGHT.tobytes())
    return path


def test_weights_are_read_one_by_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert has_weights(path)
    actual = dict(load_weights(path))
    assert list(actual) == ["w", "b"]
    assert np.array_equal(actual["w"], WEIGHT)
    assert [name for name, _ in load_weights(path, ["b"])] == ["b"]
    with pytest.raises(ModelError, match="'nothing'"):
        load_weights(path, ["nothing"])
    assert len(import_onnx(path).parameters) == 2


def test_planning_needs_no_weights(tmp_path: Path) -> None:
    path = write(tmp_path, data=False)
    assert len(import_onnx(path).parameters) == 2
    assert not has_weights(path)
    with pytest.raises(ModelError, match=r"w\.bin is missing"):
        list(load_weights(path))


def test_short_and_odd_files(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "w.bin").write_bytes(bytes(40))
    with pytest.raises(ModelError, match=r"w\.bin is too short"):
        list(load_weights(path))
    with pytest.raises(ModelError, match="said to take 8 bytes"):
        list(load_weights(write(tmp_path, length=8)))
    with pytest.raises(ModelError):
        list(load_weights(write(tmp_path, offset=-4)))


@pytest.mark.parametrize(
    "location", ["/etc/hostname", "../w.bin", "a/../../w.bin", "C:\\w.bin", "..\\w.bin", ""]
)
def test_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    path = write(tmp_path, location)
    for attempt in (import_onnx, load_weights, has_weights):
        with pytest.raises(ModelError, match="inside the model's folder"):
            attempt(path)


def test_links_that_lead_outside_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(100))
    (inside / "link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(ModelError, match="outside"):
        import_onnx(write(inside, "link.bin"))


def test_short_payload_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[1].raw_data = b"\0" * 8
    path.write_bytes(model.SerializeToString())
    assert len(import_onnx(path).parameters) == 2
    with pytest.raises(ModelError, match="'b'"):
        dict(load_weights(path))
