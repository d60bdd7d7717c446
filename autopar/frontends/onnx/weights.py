"""Reads the weights of an ONNX model one tensor at a time, without loading external files whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from autopar.errors import ModelError

from .model import external_entries, external_path, inline_functions, read_model, stored_tensors


def load_weights(
    source: str | Path | ModelProto, names: Collection[str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Read the stored tensors of the model (all, or those in `names`) one by one."""
    model, folder = read_model(source)
    stored = _stored(inline_functions(model))
    missing = sorted(set(names) - set(stored)) if names is not None else []
    if missing:
        raise ModelError(f"the model stores no tensors called {', '.join(map(repr, missing[:10]))}")
    return (
        (name, read_tensor(tensor, folder))
        for name, tensor in stored.items()
        if names is None or name in names
    )


def has_weights(source: str | Path | ModelProto) -> bool:
    """Whether the data of every stored tensor is at hand."""
    model, folder = read_model(source)
    return all(_present(tensor, folder) for tensor in model.graph.initializer)


def missing_weights(model: ModelProto, folder: Path | None) -> str:
    """The missing external files and their tensors, in words.

    "" if none is missing or the model has no data.
    """
    lost: dict[Path, list[str]] = {}
    for tensor in stored_tensors(model.graph):
        if (
            tensor.data_location == TensorProto.EXTERNAL
            and not (path := external_path(folder, tensor)).is_file()
        ):
            lost.setdefault(path, []).append(tensor.name)
    return "; ".join(
        f"the weights file {path} is missing: it holds the tensor {names[0]!r}"
        + (f" and {len(names) - 1} more" if names[1:] else "")
        for path, names in lost.items()
    )


def external_files(source: str | Path) -> list[Path]:
    """The external files with a model's tensors; none if the file is no model."""
    try:
        model, folder = read_model(source)
    except ModelError:
        return []
    external = (
        tensor
        for tensor in stored_tensors(model.graph)
        if tensor.data_location == TensorProto.EXTERNAL
    )
    return list(dict.fromkeys(external_path(folder, tensor) for tensor in external))


def _stored(model: ModelProto) -> dict[str, TensorProto]:
    """Initializers by name, and the values of Constant nodes by the name of their output."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            tensors.update(
                (node.output[0], item.t)
                for item in node.attribute
                if item.type == AttributeProto.TENSOR
            )
    return tensors


def _present(tensor: TensorProto, folder: Path | None) -> bool:
    if tensor.data_location == TensorProto.EXTERNAL:
        return external_path(folder, tensor).is_file()
    return holds_data(tensor)


def holds_data(tensor: TensorProto) -> bool:
    """Whether the elements of a stored tensor lie in the model file itself."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return False
    fields = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    return math.prod(tensor.dims) == 0 or any(len(getattr(tensor, name)) for name in fields)


def read_tensor(tensor: TensorProto, folder: Path | None) -> np.ndarray:
    """The value of a stored tensor; external data is mapped, not loaded."""
    shape = tuple(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _map(tensor, external_path(folder, tensor), shape)
    if not _present(tensor, folder):
        raise ModelError(f"the model file holds no data for the tensor {tensor.name!r}")
    try:
        return np.asarray(numpy_helper.to_array(tensor)).reshape(shape)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"the stored tensor {tensor.name!r} does not hold {shape} elements of its type: {error}"
        ) from error


def _map(tensor: TensorProto, path: Path, shape: tuple[int, ...]) -> np.ndarray:
    entries = external_entries(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if tensor.data_type in (
        TensorProto.INT4,
        TensorProto.UINT4,
        TensorProto.FLOAT4E2M1,
        TensorProto.STRING,
    ):
        raise ModelError(
            f"the tensor {tensor.name!r} in {path} has packed elements, which are not supported"
        )
    wanted = math.prod(shape) * dtype.itemsize
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or wanted)
    except ValueError as error:
        raise ModelError(
            f"the tensor {tensor.name!r} has a place in {path} that is not a number: {entries}"
        ) from error
    if not path.is_file():
        raise ModelError(f"the weights file {path} is missing: it holds the tensor {tensor.name!r}")
    if length != wanted or offset < 0:
        raise ModelError(
            f"the tensor {tensor.name!r} of {wanted} bytes is said to take {length} bytes at "
            f"{offset} in {path}"
        )
    if path.stat().st_size < offset + wanted:
        raise ModelError(
            f"the weights file {path} is too short: {tensor.name!r} ends at byte {offset + wanted} "
            f"of {path.stat().st_size}"
        )
    if wanted == 0:
        return np.empty(shape, dtype)
    return (
        np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(wanted,))
        .view(dtype)
        .reshape(shape)
    )
