"""Builds a graph operator by operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costmodel.device.device import TF32
from autopar.costmodel.frameworks import Kernels
from autopar.ir import Operator, Ref, Role, Tensor, Value

from .shape import Shape

SCORES = 4
"""Matrices of scores that Megatron's kernel takes at once."""


@dataclass(slots=True)
class GraphBuilder:
    """Tensors and operators so far, and the pins of the operators."""

    shape: Shape
    batch: int
    dtype: str
    kernels: Kernels
    tensors: dict[str, Tensor] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str | None = None,
        role: Role = Role.ACTIVATION,
    ) -> str:
        self.tensors[name] = Tensor(
            name=name,
            shape=shape,
            dtype=dtype or self.dtype,
            role=role,
            trainable=role is Role.PARAMETER,
        )
        return name

    def given(self, name: str, shape: tuple[int, ...], dtype: str = "int64") -> str:
        """An input of the graph."""
        self.inputs.append(self.tensor(name, shape, dtype, Role.INPUT))
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.tensor(name, shape, role=Role.PARAMETER)

    def size(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def op(
        self,
        name: str,
        kind: str,
        inputs: Mapping[str, str],
        out: tuple[int, ...],
        *,
        dtype: str | None = None,
        **attributes: Value,
    ) -> tuple[str, ...]:
        """Add an operator with one output of shape `out`; returns the output's name in a tuple."""
        output = self.result(name, out, dtype)
        return self.append(
            name, kind, tuple(inputs.values()), output, {**_refs(inputs), **attributes}
        )

    def add(
        self,
        name: str,
        kind: str,
        inputs: Mapping[str, str],
        out: tuple[int, ...],
        attributes: Mapping[str, Value],
    ) -> tuple[str, ...]:
        """Add an operator with one output of shape `out`, and attributes of any name."""
        output = self.result(name, out)
        return self.append(
            name, kind, tuple(inputs.values()), output, {**_refs(inputs), **attributes}
        )

    def result(
        self, name: str, shape: tuple[int, ...], dtype: str | None = None
    ) -> tuple[str, ...]:
        """Make the one output of an operator called `name`."""
        return (self.tensor(f"{name}:0", shape, dtype),)

    def append(
        self,
        name: str,
        kind: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        attributes: Mapping[str, Value],
    ) -> tuple[str, ...]:
        """Add an operator whose attributes say themselves which argument is which input."""
        self.operators.append(
            Operator(
                name=name, kind=kind, inputs=inputs, outputs=outputs, attributes=dict(attributes)
            )
        )
        return outputs

    def linear(self, name: str, x: str, width: int, *, bias: bool | None = None) -> str:
        inputs = {"input": x, "weight": self.weight(f"{name}.weight", width, self.size(x)[-1])}
        if self.shape.bias if bias is None else bias:
            inputs["bias"] = self.weight(f"{name}.bias", width)
        return self.add(
            name, "aten.linear.default", inputs, (*self.size(x)[:-1], width), self.of_products(name)
        )[0]

    def of_products(self, name: str) -> dict[str, Value]:
        """Return the attributes of a product with weights.

        The embedding and the head keep the dtype of the model.
        """
        attributes: dict[str, Value] = {}
        # TF32 is a mode of the library that holds for all products; frameworks cast operands to
        # narrower types only in linear operators of the layers, other than routers.
        everywhere = self.kernels.products == TF32
        if everywhere or (
            self.kernels.products
            and "head." not in name
            and "router" not in name
            and not name.startswith("embed.")
        ):
            attributes["compute"] = self.kernels.products
        return attributes

    def pointwise(
        self, name: str, kind: str, x: str, *, other: str | None = None, dtype: str | None = None
    ) -> str:
        """Add an operator on the elements of `x`, and of `other` if it is given; its output."""
        inputs = {"self": x} if other is None else {"self": x, "other": other}
        return self.op(name, kind, inputs, self.size(x), dtype=dtype)[0]

    def view(self, name: str, kind: str, x: str, out: tuple[int, ...], **attributes: Value) -> str:
        return self.add(name, kind, {"self": x}, out, attributes)[0]

    def pieces(self, name: str, x: str, widths: tuple[int, ...]) -> tuple[str, ...]:
        """Views of the last dim in pieces of the given widths."""
        pieces = tuple(
            self.tensor(f"{name}:{i}", (*self.size(x)[:-1], width))
            for i, width in enumerate(widths)
        )
        attributes: dict[str, Value] = {"self": Ref(0), "split_sizes": widths, "dim": -1}
        return self.append(name, "aten.split_with_sizes.default", (x,), pieces, attributes)

    def join(self, name: str, parts: tuple[str, ...]) -> str:
        """Copy tensors side by side, along the last dim."""
        out = (*self.size(parts[0])[:-1], sum(self.size(part)[-1] for part in parts))
        attributes: dict[str, Value] = {
            "tensors": tuple(Ref(index) for index in range(len(parts))),
            "dim": -1,
        }
        output = self.result(name, out)
        return self.append(name, "aten.cat.default", parts, output, attributes)[0]

    def dropout(self, name: str, x: str) -> str:
        if not self.shape.dropout:
            return x
        # The price does not depend on the rate.
        return self.op(name, "aten.dropout.default", {"input": x}, self.size(x), p=0.1, train=True)[
            0
        ]

    def normalised(self, name: str, x: str) -> str:
        """Layer or RMS norm over the last dim."""
        width = self.size(x)[-1]
        if self.kernels.norm == "unfused":
            return self._norm_in_pieces(name, x)
        inputs = {"input": x, "weight": self.weight(f"{name}.weight", width)}
        if self.shape.norm == "layer_norm":
            inputs["bias"] = self.weight(f"{name}.bias", width)
        return self.op(
            name, f"aten.{self.shape.norm}.default", inputs, self.size(x), normalized_shape=(width,)
        )[0]

    def _norm_in_pieces(self, name: str, x: str) -> str:
        """RMS norm as a chain of kernels in float32: x * rsqrt(mean(x^2) + eps) * weight."""
        shape = self.size(x)
        one = (*shape[:-1], 1)
        wide = self.pointwise(f"{name}.float", "aten.to.dtype", x, dtype="float32")
        square = self.op(
            f"{name}.square",
            "aten.pow.Tensor_Scalar",
            {"self": wide},
            shape,
            dtype="float32",
            exponent=2,
        )[0]
        mean = self.op(
            f"{name}.mean",
            "aten.mean.dim",
            {"self": square},
            one,
            dtype="float32",
            dim=(-1,),
            keepdim=True,
        )[0]
        scale = self.pointwise(f"{name}.rsqrt", "aten.rsqrt.default", mean, dtype="float32")
        scaled = self.pointwise(
            f"{name}.scale", "aten.mul.Tensor", wide, other=scale, dtype="float32"
        )
        narrow = self.pointwise(f"{name}.narrow", "aten.to.dtype", scaled, dtype=self.dtype)
        return self.pointwise(
            f"{name}.weigh",
            "aten.mul.Tensor",
            narrow,
            other=self.weight(f"{name}.weight", shape[-1]),
        )


def _refs(inputs: Mapping[str, str]) -> dict[str, Value]:
    """Return the attributes that name the inputs, in their order."""
    return {argument: Ref(index) for index, argument in enumerate(inputs)}
