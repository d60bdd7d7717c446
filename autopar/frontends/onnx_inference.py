"""Infers the element types and shapes of every node's outputs, from its inputs and the constants that decide shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from onnx import NodeProto, OperatorSetIdProto, TensorProto, TypeProto, checker, helper, numpy_helper, shape_inference

from autopar.frontends.onnx_canonical import OPTIONAL, REQUIRED
from autopar.frontends.onnx_nodes import refuse
from autopar.frontends.onnx_rebatch import Rebatch
from autopar.frontends.onnx_shapes import own_inference
from autopar.frontends.onnx_values import FOLD_LIMIT, Signature, Val, type_proto
from autopar.ir.graph import Role, Value

_LONGEST_LIST = 1024  # elements of a float initializer that may be an argument, as the scales of a Resize


def static_shape(found: TypeProto | None) -> tuple[int, ...] | None:
    """The shape of a tensor type if every dim of it is a number."""
    if found is None or not found.HasField("tensor_type") or not found.tensor_type.HasField("shape"):
        return None
    dims = found.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def _with_onesided(node: NodeProto) -> NodeProto:
    """The node with the default of `onesided` written out, which the inference in onnx takes for 0."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.attribute.append(helper.make_attribute("onesided", 1))
    return copy


class Inference:
    """Node by node inference; `declared` holds the types that the file declares, `read` fetches stored data."""

    def __init__(
        self,
        versions: Mapping[str, int],
        declared: Mapping[str, TypeProto],
        read: Callable[[TensorProto], np.ndarray],
        rebatch: Rebatch | None,
    ) -> None:
        self.opsets: list[OperatorSetIdProto] = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
        self.declared, self.read, self.rebatch = declared, read, rebatch

    def types(
        self,
        node: NodeProto,
        spec: Signature,
        inputs: list[Val | None],
        known: list[np.ndarray | None],
        attributes: Mapping[str, Value],
        *,
        required: bool,
    ) -> list[tuple[int, tuple[int, ...] | None]]:
        """Element type and shape of every output; a shape is None where even the constants do not tell it."""
        wanted = (*REQUIRED.get(node.op_type, ()), *OPTIONAL.get(node.op_type, ()))
        types: dict[str, TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for position, (name, val) in enumerate(zip(node.input, inputs, strict=True)):
            if val is None:
                continue
            types[name] = type_proto(val.dtype, val.shape)
            if wanted and position < len(spec.inputs) and spec.inputs[position] in wanted:
                array = self.argument(node, val, spec.inputs[position], required=required)
                if array is not None:
                    if self.rebatch is not None and position == 1 and node.op_type in ("Reshape", "Expand"):
                        array = self.rebatch.target(node, inputs[0], array)
                    known[position] = array
                    if node.op_type == "Range" and array.size == 1:  # files write scalars as vectors of one element
                        array = array.reshape(())
                        types[name] = type_proto(val.dtype, ())
                    data[name] = numpy_helper.from_array(array)
        if node.op_type == "STFT" and "onesided" not in attributes:
            node = _with_onesided(node)
        try:
            found = shape_inference.infer_node_outputs(spec.schema, node, types, data, None, self.opsets, 10)
        except (shape_inference.InferenceError, checker.ValidationError, RuntimeError, ValueError, TypeError, KeyError) as error:
            shapes = [val.shape for val in inputs if val is not None]
            refuse(node, f"has inputs that do not fit together: {str(error).strip()} (inputs {shapes})")
        return [self.output_type(node, index, found.get(name), inputs, attributes) for index, name in enumerate(node.output)]

    def argument(self, node: NodeProto, val: Val, formal: str, *, required: bool) -> np.ndarray | None:
        """The value of an argument that decides shapes."""
        array = val.known()
        needed = formal in REQUIRED.get(node.op_type, ()) or node.op_type in ("Reshape", "Expand")
        limit = FOLD_LIMIT if val.role is Role.CONSTANT else _LONGEST_LIST
        if array is None and needed and val.role in (Role.CONSTANT, Role.PARAMETER) and val.size <= limit:
            array = val.decode(self.read)
        if array is None and required and formal in REQUIRED.get(node.op_type, ()) and val.size:
            refuse(node, f"takes {formal!r} from {val.name!r}, which depends on the values of the model's inputs")
        return array

    def output_type(
        self,
        node: NodeProto,
        index: int,
        found: TypeProto | None,
        inputs: list[Val | None],
        attributes: Mapping[str, Value],
    ) -> tuple[int, tuple[int, ...] | None]:
        """One output's element type and shape: from onnx, else from the rules here, else as the file declares it."""
        shape = static_shape(found)
        code = found.tensor_type.elem_type if found is not None else 0
        if shape is None or not code:
            own = own_inference(node.op_type, index, inputs, attributes)
            if own is not None:
                code, shape = code or own[0], own[1] if shape is None else shape
        if shape is None or not code:
            declared = self.declared.get(node.output[index])
            code = code or (declared.tensor_type.elem_type if declared is not None else 0)
            shape = static_shape(declared) if shape is None and self.rebatch is None else shape
        return code, shape
