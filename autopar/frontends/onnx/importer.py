"""Imports an ONNX model as a `Graph`, without its weights and without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from autopar.errors import AutoparError, ModelError
from autopar.ir.graph import Graph, Operator, Ref, Role, Tensor, Value, unused_name
from autopar.ir.stored_products import LINEAR
from autopar.raising import raised

from .builder import Builder, Record
from .dims import Binding, Dim, bind_dims
from .lowering import lower
from .microsoft import OPERATORS
from .model import inline_functions, opset_versions, read_model, refuse_unknown_operators
from .rebatch import Rebatch
from .roles import Roles, settle_roles
from .specialised import Known, specialised
from .values import FOLD_LIMIT, Val, dtype_name, is_float_code
from .weights import read_tensor


def import_onnx(
    model: str | Path | ModelProto,
    *,
    dims: Mapping[str, int] | None = None,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    roles: Roles | None = None,
    values: Mapping[str, Known] | None = None,
    outputs: Sequence[str] = (),
    seen: Callable[[ModelProto, Path | None], None] | None = None,
) -> Graph:
    """The graph of an ONNX model: constants folded, every shape known, weights left in the file.

    `dims`: sizes of symbolic dims by name. `shapes`: whole shapes of inputs by name. `batch`: a new
    size for the inputs' leading dims. `roles`: which stored floats are parameters, instead of the
    rule of `roles`. `values`: of inputs that are constants. `outputs`: names of the tensors that
    are given in place of the file's outputs. `seen`: called with the file's content and folder.
    """
    label = Path(model).name if isinstance(model, str | Path) else "in memory"
    try:
        proto, folder = read_model(model)
        if seen is not None:
            seen(proto, folder)
        proto = specialised(proto, values or {}, outputs)
        versions = opset_versions(proto)
        proto = inline_functions(proto)
        refuse_unknown_operators(proto, versions, OPERATORS)
        inputs = _real_inputs(proto.graph)
        binding = bind_dims(
            {item.name: _written_shape(item) for item in inputs},
            dims=dims or {},
            batch=batch,
            shapes=shapes or {},
        )
        builder = _walk(proto.graph, versions, inputs, binding, folder)
        title = proto.graph.name or Path(label).stem
        return raised(_finish(builder, title, [builder.env[i.name] for i in inputs], roles))
    except AutoparError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise ModelError(
            f"the model {label} is not well formed: {type(error).__name__}: {error}"
        ) from error


def _real_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """The inputs that a user feeds: old files list the initializers among them."""
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [item for item in graph.input if item.name not in stored]
    for item in inputs:
        if not item.type.HasField("tensor_type"):
            raise ModelError(
                f"the input {item.name!r} is a "
                f"{item.type.WhichOneof('value') or 'value without a type'}, not a tensor"
            )
    return inputs


def _written_shape(item: ValueInfoProto) -> tuple[Dim, ...] | None:
    kind = item.type.tensor_type
    if not kind.HasField("shape"):
        return None
    # Paddle's exporter writes -1 and "?" for sizes that are open.
    return tuple(
        {-1: None}.get(dim.dim_value, dim.dim_value)
        if dim.HasField("dim_value")
        else (dim.dim_param.strip(" ?") or None)
        for dim in kind.shape.dim
    )


def _walk(
    graph: GraphProto,
    versions: Mapping[str, int],
    inputs: list[ValueInfoProto],
    binding: Binding,
    folder: Path | None,
) -> Builder:
    """Walk the file once, or twice where its own batch must be told from the new one."""

    def read(tensor: TensorProto) -> np.ndarray:
        return read_tensor(tensor, folder)

    def walk(shapes: Mapping[str, tuple[int, ...]], rebatch: Rebatch | None) -> Builder:
        builder = Builder(graph, versions, read=read, rebatch=rebatch)
        for item in inputs:
            builder.add_input(item.name, item.type.tensor_type.elem_type, shapes[item.name])
        builder.add_initializers(graph)
        builder.walk(list(graph.node))
        return builder

    if binding.old_batch is None:
        return walk(binding.shapes, None)
    before = {
        key: val.shape
        for key, val in walk(binding.written, None).env.items()
        if isinstance(val, Val)
    }
    new = next(
        binding.shapes[key][0]
        for key, shape in binding.written.items()
        if shape and shape[0] != binding.shapes[key][0]
    )
    return walk(binding.shapes, Rebatch(before, binding.old_batch, new))


def _finish(builder: Builder, title: str, inputs: list[object], roles: Roles | None) -> Graph:
    """Drops dead operators, tells constants from parameters, and declares the remaining tensors."""
    outputs: list[Val] = []
    for item in builder.graph.output:
        entry = builder.env.get(item.name)
        if not isinstance(entry, Val):
            raise ModelError(
                f"the output {item.name!r} is never made"
                if entry is None
                else f"the output {item.name!r} is a sequence"
            )
        outputs.append(entry)
    records = _alive(builder.records, outputs)
    settle_roles(records, outputs, roles or Roles())
    records = lower(records, outputs, builder.unique)
    records = _alive(list(_as_linear(records)), outputs)
    vals = dict.fromkeys(val for val in inputs if isinstance(val, Val))
    read = [val for record in records for val in record.tensors()] + outputs
    stored = dict.fromkeys(val for val in read if val.role in (Role.PARAMETER, Role.CONSTANT))
    order = {name: position for position, name in enumerate(builder.env)}
    by_position = sorted(stored, key=lambda val: order.get(val.name, len(order)))
    made = (val for record in records for val in record.outputs)
    vals |= dict.fromkeys((*by_position, *made))
    return Graph(
        name=title,
        tensors={val.name: _tensor(val) for val in vals},
        operators=_operators(records),
        inputs=tuple(val.name for val in inputs if isinstance(val, Val)),
        outputs=tuple(val.name for val in outputs),
        constants={val.name: array for val in vals if (array := _small_constant(val)) is not None},
    )


def _as_linear(records: Iterable[Record]) -> Iterator[Record]:
    """Rewrite `MatMul(x, Transpose(W))` as `linear(x, W)`.

    So W is gathered, and its gradient reduced, as a parameter's.
    """
    turned: dict[Val, Val] = {}
    for record in records:
        if record.kind == "aten.permute.default":
            (source,) = record.tensors()
            stored = source.role is Role.PARAMETER and is_float_code(source.dtype)
            if stored and record.arguments["dims"] == (1, 0):
                turned[record.outputs[0]] = source
        right = record.arguments.get("other") if record.kind == "aten.matmul.default" else None
        if isinstance(right, Val) and right in turned:
            arguments = {"input": record.arguments["self"], "weight": turned[right]}
            record = Record(
                name=record.name, kind=LINEAR, arguments=arguments, outputs=record.outputs
            )
        yield record


def _alive(records: list[Record], outputs: list[Val]) -> list[Record]:
    needed = set(outputs)
    alive = []
    for record in reversed(records):
        if not needed.isdisjoint(record.outputs):
            needed.update(record.tensors())
            alive.append(record)
    return alive[::-1]


def _tensor(val: Val) -> Tensor:
    return Tensor(
        name=val.name,
        shape=val.shape,
        dtype=dtype_name(val.dtype, f"the tensor {val.name!r}"),
        role=val.role,
        trainable=val.role is Role.PARAMETER and is_float_code(val.dtype),
    )


def _small_constant(val: Val) -> np.ndarray | None:
    if val.role is Role.CONSTANT and val.size <= FOLD_LIMIT and val.payload is not None:
        return val.decode() if val.foldable else None
    return val.array if val.role in (Role.CONSTANT, Role.PARAMETER) else None


def _operators(records: list[Record]) -> tuple[Operator, ...]:
    names: set[str] = set()
    operators = []
    for record in records:
        name = unused_name(record.name, names)
        names.add(name)
        inputs: list[str] = []
        attributes = {key: _value(argument, inputs) for key, argument in record.arguments.items()}
        outputs = tuple(val.name for val in record.outputs)
        operators.append(
            Operator(
                name=name,
                kind=record.kind,
                inputs=tuple(inputs),
                outputs=outputs,
                attributes=attributes,
            )
        )
    return tuple(operators)


def _value(argument: object, inputs: list[str]) -> Value:
    """An argument as an attribute's value; tensors are appended to `inputs`."""
    if isinstance(argument, Val):
        inputs.append(argument.name)
        return Ref(len(inputs) - 1)
    if isinstance(argument, tuple):
        return tuple(_value(item, inputs) for item in argument)
    if argument is None or isinstance(argument, int | float | bool | str):
        return argument
    raise ModelError(f"an argument of type {type(argument).__name__} cannot be kept")
