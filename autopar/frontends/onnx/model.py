"""Reads an ONNX file without its weights, and refuses data files outside its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.text_format import ParseError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from onnx.checker import ValidationError
from onnx.defs import SchemaError

from autopar.errors import ModelError, UnsupportedOperators

from .bounds import nodes_within, require_bounded, require_text

OLDEST_OPSET = 7
REMEDY = (
    "Export the model with operators of the ONNX standard, or with a local function in the file "
    "that defines each of these by such "
    "operators; or plan the PyTorch module itself (package.module:function), with "
    "autopar.register_rule or --discover for its own operators"
)
_BY_DEFINITION = frozenset({("ai.onnx.preview", "FlexAttention")})


def read_model(source: str | Path | ModelProto) -> tuple[ModelProto, Path | None]:
    """The model's protobuf and the folder that its external data is relative to.

    The folder is None for a model in memory.
    """
    if isinstance(source, ModelProto):
        model = source
        folder = None
        label = "the model"
    else:
        path = Path(source)
        if not path.is_file():
            raise ModelError(
                f"there is no model file {str(source)!r}"
                + (": it is a folder" if path.is_dir() else "")
            )
        label = f"the file {str(source)!r}"
        folder = path.parent
        try:
            model = onnx.load(path, load_external_data=False)
        except (DecodeError, ParseError, UnicodeDecodeError, ValueError, OSError) as error:
            raise ModelError(f"{label} is not an ONNX model, or is truncated: {error}") from error
    if not model.opset_import or not model.HasField("graph") or not model.graph.output:
        raise ModelError(f"{label} is not an ONNX model: it has no graph, no output or no opset")
    require_text(model)
    for tensor in stored_tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            external_path(folder, tensor)
    return model, folder


def stored_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Tensors of a graph and its subgraphs.

    Initializers, and Constant nodes' values (by the output's name).
    """
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == AttributeProto.GRAPH:
                yield from stored_tensors(attribute.g)


def external_entries(tensor: TensorProto) -> dict[str, str]:
    """The `location`, `offset` and `length` of a tensor's external data."""
    return {entry.key: entry.value for entry in tensor.external_data}


def external_path(folder: Path | None, tensor: TensorProto) -> Path:
    """The path of a tensor's external data, always inside the model's folder."""
    location = external_entries(tensor).get("location", "")
    windows = PureWindowsPath(location)
    posix = PurePosixPath(location)
    escapes = (
        windows.drive
        or windows.root
        or posix.is_absolute()
        or ".." in windows.parts
        or ".." in posix.parts
    )
    if not location or escapes:
        raise ModelError(
            f"tensor {tensor.name!r} keeps its data in {location!r}, which is not a file inside "
            "the model's folder"
        )
    path = (folder or Path()) / location
    if folder is not None and not path.resolve().is_relative_to(folder.resolve()):
        raise ModelError(
            f"tensor {tensor.name!r} keeps its data in {location!r}, a link that leads outside the "
            "model's folder"
        )
    return path


def domain_of(node: NodeProto) -> str:
    """The node's operator set; "ai.onnx" is the default one."""
    return "" if node.domain == "ai.onnx" else node.domain


def kind_of(node: NodeProto) -> str:
    """The operator kind of a node, as the graph spells it."""
    return f"{domain_of(node) or 'onnx'}.{node.op_type}"


def opset_versions(model: ModelProto) -> dict[str, int]:
    """Version of each operator set that the model imports."""
    versions = {
        "" if entry.domain == "ai.onnx" else entry.domain: entry.version
        for entry in model.opset_import
    }
    if versions.get("", OLDEST_OPSET) < OLDEST_OPSET:
        raise ModelError(
            f"the model uses opset {versions['']}, the oldest read here is {OLDEST_OPSET}: convert "
            "it by onnx.version_converter"
        )
    return versions


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace local functions, and operators that hold arithmetic as subgraphs, by their bodies."""
    import onnx.inliner

    require_bounded(model)
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        if any(
            (node.domain, node.op_type) in _BY_DEFINITION for node in nodes_within(model.graph.node)
        ):
            model = onnx.inliner.inline_selected_functions(
                model, sorted(_BY_DEFINITION), inline_schema_functions=True
            )
        return model
    except (RuntimeError, ValueError, DecodeError, ValidationError) as error:
        raise ModelError(f"the model's local functions cannot be inlined: {error}") from error


def refuse_unknown_operators(
    model: ModelProto, versions: dict[str, int], others: Container[tuple[str, str]]
) -> None:
    """Raises one error that names every operator without a schema, subgraphs included.

    `others`: domains and names of operators that are read without one.
    """
    counts: Counter[str] = Counter()
    checked: dict[tuple[str, str], bool] = {}
    for node in nodes_within(model.graph.node):
        key = (domain_of(node), node.op_type)
        if key not in checked:
            checked[key] = key in others or has_schema(*key, versions)
        if not checked[key]:
            counts[kind_of(node)] += 1
    if counts:
        known = [
            f"{schema.domain or 'onnx'}.{schema.name}" for schema in onnx.defs.get_all_schemas()
        ]
        raise UnsupportedOperators(dict(counts), known, remedy=REMEDY)


def has_schema(domain: str, name: str, versions: dict[str, int]) -> bool:
    """Whether this version of onnx defines the operator at the version that the model imports."""
    if domain not in versions:
        return False
    try:
        onnx.defs.get_schema(name, versions[domain], domain)
    except SchemaError:
        return False
    return True
