"""Infers the element types and shapes of every node's outputs from its inputs and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from onnx import (
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TypeProto,
    checker,
    helper,
    numpy_helper,
    shape_inference,
)

from autopar.ir.graph import Role, Value

from .calls import OPTIONAL, REQUIRED
from .nodes import refuse
from .rebatch import Rebatch
from .shapes import own_inference
from .values import FOLD_LIMIT, Signature, Val, type_proto

_LONGEST_LIST = (
    1024  # elements of a float initializer that may be an argument, as the scales of a Resize
)


def static_shape(proto: TypeProto | None) -> tuple[int, ...] | None:
    """The shape of a tensor type if every dim of it is a number."""
    if (
        proto is None
        or not proto.HasField("tensor_type")
        or not proto.tensor_type.HasField("shape")
    ):
        return None
    dims = proto.tensor_type.shape.dim
    if all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
        return tuple(dim.dim_value for dim in dims)
    return None


def _with_onesided(node: NodeProto) -> NodeProto:
    """Write out the default of `onesided`, which the inference in onnx takes for 0."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.attribute.append(helper.make_attribute("onesided", 1))
    return copy


class Inference:
    """Infers types and shapes, node by node.

    `declared` holds the types that the file declares, `read` fetches stored data.
    """

    def __init__(
        self,
        versions: Mapping[str, int],
        declared: Mapping[str, TypeProto],
        read: Callable[[TensorProto], np.ndarray],
        rebatch: Rebatch | None,
    ) -> None:
        self.opsets: list[OperatorSetIdProto] = [
            helper.make_opsetid(domain, version) for domain, version in versions.items()
        ]
        self.declared = declared
        self.read = read
        self.rebatch = rebatch

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
        """Infer the element type and shape of every output.

        A shape is None where even the constants do not tell it.
        """
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
                    if (
                        self.rebatch is not None
                        and position == 1
                        and node.op_type in ("Reshape", "Expand")
                    ):
                        array = self.rebatch.target(node, inputs[0], array)
                    known[position] = array
                    # Files write the scalars of a range as vectors of one element.
                    if node.op_type == "Range" and array.size == 1:
                        array = array.reshape(())
                        types[name] = type_proto(val.dtype, ())
                    data[name] = numpy_helper.from_array(array)
        if node.op_type == "STFT" and "onesided" not in attributes:
            node = _with_onesided(node)
        try:
            inferred = shape_inference.infer_node_outputs(
                spec.schema, node, types, data, None, self.opsets, 10
            )
        except (
            shape_inference.InferenceError,
            checker.ValidationError,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:
            shapes = [val.shape for val in inputs if val is not None]
            refuse(
                node, f"has inputs that do not fit together: {str(error).strip()} (inputs {shapes})"
            )
        return [
            self.output_type(node, index, inferred.get(name), inputs, attributes)
            for index, name in enumerate(node.output)
        ]

    def argument(
        self, node: NodeProto, val: Val, formal: str, *, required: bool
    ) -> np.ndarray | None:
        """The value of an argument that decides shapes."""
        array = val.known()
        needed = formal in REQUIRED.get(node.op_type, ()) or node.op_type in ("Reshape", "Expand")
        limit = FOLD_LIMIT if val.role is Role.CONSTANT else _LONGEST_LIST
        if (
            array is None
            and needed
            and val.role in (Role.CONSTANT, Role.PARAMETER)
            and val.size <= limit
        ):
            array = val.decode(self.read)
        if array is None and required and formal in REQUIRED.get(node.op_type, ()) and val.size:
            refuse(
                node,
                f"takes {formal!r} from {val.name!r}, which depends on the values of the model's "
                "inputs: give them by --value, or end the model before it by --outputs",
            )
        return array

    def output_type(
        self,
        node: NodeProto,
        index: int,
        inferred: TypeProto | None,
        inputs: list[Val | None],
        attributes: Mapping[str, Value],
    ) -> tuple[int, tuple[int, ...] | None]:
        """Infer one output's element type and shape.

        They come from onnx, else from the rules here, else from the file's own declaration.
        """
        shape = static_shape(inferred)
        code = inferred.tensor_type.elem_type if inferred is not None else 0
        if shape is None or not code:
            own = own_inference(node.op_type, index, inputs, attributes)
            if own is not None:
                code = code or own[0]
                shape = own[1] if shape is None else shape
        if shape is None or not code:
            declared = self.declared.get(node.output[index])
            code = code or (declared.tensor_type.elem_type if declared is not None else 0)
            shape = static_shape(declared) if shape is None and self.rebatch is None else shape
        return code, shape
