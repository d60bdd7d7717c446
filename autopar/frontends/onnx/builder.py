"""Walks an ONNX graph once.

Folds known values, infers every shape, and spells each remaining operator one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from autopar.errors import ModelError
from autopar.ir.graph import Role, Value, unused_name

from .calls import Argument
from .folding import RANDOM, CannotFold, evaluate
from .inference import Inference
from .loops import LOOPS
from .microsoft import OPERATORS
from .model import domain_of
from .nodes import call_arguments, handed_on, label, names_read, refuse, without_gaps
from .rebatch import Rebatch
from .sequences import SEQUENCES
from .values import FOLD_LIMIT, Signature, Val, attribute_value, constant, signature
from .weight_slots import weight_like
from .writer import STANDARD, Writer

Entry = Val | list[Val]


@dataclass(slots=True, kw_only=True)
class Record:
    """An operator that stays, before names and dead code are settled."""

    name: str
    kind: str
    arguments: dict[str, Argument]
    outputs: list[Val]
    version: int = 0

    def tensors(self) -> Iterator[Val]:
        """The tensor arguments, in formal order."""
        for value in self.arguments.values():
            if isinstance(value, Val):
                yield value
            elif isinstance(value, tuple):
                yield from (item for item in value if isinstance(item, Val))


class Builder:
    """The state of one walk: the value of each name of the ONNX graph, and the operators so far."""

    def __init__(
        self,
        graph: GraphProto,
        versions: Mapping[str, int],
        *,
        read: Callable[[TensorProto], np.ndarray],
        rebatch: Rebatch | None = None,
    ) -> None:
        self.graph = graph
        self.versions = versions
        self.read = read
        self.rebatch = rebatch
        self.env: dict[str, Entry] = {}
        self.records: list[Record] = []
        self.taken: set[str] = set()
        self.output_names = {value.name for value in graph.output}
        self.used = set(names_read(graph)) | self.output_names
        self.weights = weight_like(graph)
        declared = {value.name: value.type for value in (*graph.value_info, *graph.output)}
        self.inference = Inference(versions, declared, read, rebatch)
        standard = {**versions, "": STANDARD}
        self.standard = standard, Inference(standard, declared, read, rebatch)

    def add_input(self, name: str, code: int, shape: tuple[int, ...]) -> Val:
        """Declares a graph input."""
        val = Val(self.unique(name), code, shape, Role.INPUT)
        self.env[name] = val
        return val

    def add_initializers(self, graph: GraphProto) -> None:
        """Declares stored tensors.

        Floats of several elements are parameters, the others constants.
        """
        for tensor in graph.initializer:
            self.env[tensor.name] = self.stored(tensor.name, tensor, weight=True)
        if graph.sparse_initializer:
            raise ModelError(
                f"the model stores {len(graph.sparse_initializer)} sparse initializers, which are "
                "not supported"
            )

    def stored(self, name: str, tensor: TensorProto, *, weight: bool) -> Val:
        """A stored tensor, not decoded yet."""
        shape = tuple(tensor.dims)
        if any(size < 0 for size in shape):
            raise ModelError(f"the stored tensor {name!r} has the shape {shape}")
        val = Val(self.unique(name), tensor.data_type, shape, Role.CONSTANT, payload=tensor)
        floating = tensor.data_type in _FLOATS
        if floating and val.size > 1 and weight:
            val.role = Role.PARAMETER
        else:
            val.foldable = val.size <= FOLD_LIMIT and tensor.data_location != TensorProto.EXTERNAL
        return val

    def unique(self, name: str) -> str:
        """A tensor name that no other tensor has."""
        fresh = unused_name(name, self.taken)
        self.taken.add(fresh)
        return fresh

    def value(self, node: NodeProto, name: str) -> Val:
        """The value of a node's input."""
        entry = self.env.get(name)
        if entry is None:
            refuse(node, f"reads {name!r}, which nothing before it makes")
        if isinstance(entry, list):
            refuse(node, f"reads the sequence {name!r}, which is not supported here")
        return entry

    def walk(self, nodes: Iterator[NodeProto] | list[NodeProto]) -> None:
        """Processes nodes in the order of the file, which ONNX wants topological."""
        for node in nodes:
            domain = domain_of(node)
            if (write := OPERATORS.get((domain, node.op_type))) is not None:
                write(Writer(self, node))
                continue
            handler = _SPECIAL.get(node.op_type) if domain == "" else None
            (handler or Builder.apply)(self, node)

    def apply_standard(self, node: NodeProto) -> None:
        """An operator of the standard as `writer` knows it, whatever the file's own opset is."""
        before = self.versions, self.inference
        self.versions, self.inference = self.standard
        try:
            self.apply(node)
        finally:
            self.versions, self.inference = before

    def apply(self, node: NodeProto) -> None:
        """An ordinary operator: folded, elided or recorded."""
        inputs = [self.value(node, name) if name else None for name in node.input]
        if any(
            attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS)
            for attribute in node.attribute
        ):
            refuse(node, "holds a subgraph, which is not supported")
        node = without_gaps(node)
        domain = domain_of(node)
        if self.rebatch is not None and node.op_type in _INDEXED:
            self.follow_batch(node, inputs, self.rebatch)
        spec = signature(domain, node.op_type, self.versions[domain])
        attributes = {item.name: attribute_value(item) for item in node.attribute}
        known = [val.known() if val is not None else None for val in inputs]
        constants_only = all(
            val is None or array is not None for val, array in zip(inputs, known, strict=True)
        )
        foldable = constants_only and domain == "" and node.op_type not in RANDOM
        types = self.inference.types(node, spec, inputs, known, attributes, required=not foldable)
        small = all(shape is None or math.prod(shape) <= FOLD_LIMIT for _, shape in types)
        if foldable and (small or self.is_filled_weight(node)):
            try:
                self.fold(node, known, attributes)
                return
            except CannotFold:
                if any(shape is None for _, shape in types):
                    raise
        outputs = []
        for index, (name, (code, shape)) in enumerate(zip(node.output, types, strict=True)):
            if shape is None and name not in self.used and index in spec.optional_outputs:
                code = TensorProto.UNDEFINED
                shape = ()
            if shape is None:
                before = ", ".join(filter(None, node.input)) or "none"
                refuse(
                    node,
                    f"makes {name!r}, whose shape depends on the values of the model's inputs: end "
                    f"the model before it by --outputs NAME (it reads {before})",
                )
            outputs.append(Val("", code, shape))
        self.record(node, spec, inputs, attributes, outputs)

    def follow_batch(self, node: NodeProto, inputs: list[Val | None], rebatch: Rebatch) -> None:
        """Replaces constant indices that count through the batch."""
        source, indices = inputs[:2]
        array = indices.known() if indices is not None else None
        if source is None or indices is None or array is None:
            return
        longer = rebatch.indices(node, source, array)
        if longer is not array:
            inputs[1] = constant(self.unique(indices.name), longer)

    def is_filled_weight(self, node: NodeProto) -> bool:
        """Whether the node makes a weight of one repeated value."""
        return node.op_type == "ConstantOfShape" and node.output[0] in self.weights

    def fold(
        self, node: NodeProto, known: list[np.ndarray | None], attributes: Mapping[str, Value]
    ) -> None:
        """Replaces a node by its value."""
        defaults = signature("", node.op_type, self.versions[""]).defaults
        if self.is_filled_weight(node) and known[0] is not None:
            fill = next(
                (numpy_helper.to_array(item.t).ravel() for item in node.attribute),
                np.zeros(1, np.float32),
            )
            results = [np.broadcast_to(fill[0], tuple(known[0].tolist()))]
        else:
            results = evaluate(node, known, {**defaults, **attributes}, self.versions)
        for name, array in zip(node.output, results, strict=False):
            val = constant(self.unique(name), array)
            if name in self.weights and array.dtype.kind == "f" and array.size > 1:
                val.role = Role.PARAMETER
                val.foldable = False
            elif array.size > FOLD_LIMIT:
                val.foldable = False
            self.env[name] = val

    def record(
        self,
        node: NodeProto,
        spec: Signature,
        inputs: list[Val | None],
        attributes: dict[str, Value],
        outputs: list[Val],
    ) -> None:
        """Record the operator.

        One that does nothing is left out: its output becomes another name of its input.
        """
        arguments = call_arguments(node, spec, inputs, attributes, self.read)
        wanted = [name in self.used for name in node.output]
        same = handed_on(node.op_type, arguments, outputs, wanted) if not domain_of(node) else None
        if same is not None and node.output[0] not in self.output_names:
            self.env[node.output[0]] = same
            return
        count = len(outputs)
        while count > 1 and not wanted[count - 1] and count - 1 in spec.optional_outputs:
            count -= 1
        for name, val in zip(node.output[:count], outputs, strict=False):
            val.name = self.unique(name)
            self.env[name] = val
            if self.rebatch is not None:
                self.rebatch.check(node, name, val.shape, inputs[0] if inputs else None)
        for name in ("input_mean", "input_var"):
            statistic = arguments.get(name)
            if isinstance(statistic, Val) and statistic.role is Role.PARAMETER:
                statistic.role = Role.CONSTANT
        self.records.append(
            Record(
                name=label(node),
                kind=f"{domain_of(node) or 'onnx'}.{node.op_type}",
                arguments=arguments,
                outputs=outputs[:count],
                version=spec.schema.since_version,
            )
        )


_INDEXED = frozenset(
    {"Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements", "Scatter"}
)
_FLOATS = frozenset(
    {
        TensorProto.DOUBLE,
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.FLOAT8E5M2,
        TensorProto.COMPLEX64,
        TensorProto.COMPLEX128,
    }
)


def _constant(builder: Builder, node: NodeProto) -> None:
    (name,) = node.output
    for item in node.attribute:
        if item.name == "value" and item.type == AttributeProto.TENSOR:
            builder.env[name] = builder.stored(name, item.t, weight=name in builder.weights)
            return
        if item.name in ("value_int", "value_ints", "value_float", "value_floats"):
            dtype = np.int64 if item.name.startswith("value_int") else np.float32
            builder.env[name] = constant(
                builder.unique(name), np.array(helper.get_attribute_value(item), dtype)
            )
            return
    refuse(node, "holds a value that is not a dense tensor of numbers")


def _shape(builder: Builder, node: NodeProto) -> None:
    shape = builder.value(node, node.input[0]).shape
    attributes = {item.name: item.i for item in node.attribute}
    array = np.array(shape[slice(attributes.get("start", 0), attributes.get("end"))], np.int64)
    if node.op_type == "Size":
        array = np.array(math.prod(shape), np.int64)
    builder.env[node.output[0]] = constant(builder.unique(node.output[0]), array)


def _if(builder: Builder, node: NodeProto) -> None:
    condition = builder.value(node, node.input[0]).known()
    if condition is None:
        refuse(node, "branches as values of the model's inputs say: give them by --value")
    wanted = "then_branch" if bool(condition.reshape(())) else "else_branch"
    branch = next((item.g for item in node.attribute if item.name == wanted), None)
    if branch is None or len(branch.output) < len(node.output):
        refuse(node, f"lacks its {wanted}")
    builder.add_initializers(branch)
    builder.walk(list(branch.node))
    for place, value in enumerate(branch.output[: len(node.output)]):
        if value.name not in builder.env:
            refuse(node, f"returns {value.name!r}, which its branch does not make")
        if node.output[place] in builder.output_names:
            Writer(builder, node).last("Identity", value.name, place=place)
        else:
            builder.env[node.output[place]] = builder.env[value.name]


def _unsupported_region(builder: Builder, node: NodeProto) -> None:
    refuse(node, "maps a sequence, which cannot be planned: export the model with it written out")


_SPECIAL: Mapping[str, Callable[[Builder, NodeProto], None]] = {
    **SEQUENCES,
    "Constant": _constant,
    "Shape": _shape,
    "Size": _shape,
    "If": _if,
    **LOOPS,
    "SequenceMap": _unsupported_region,
}
