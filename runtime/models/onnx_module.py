"""An `nn.Module` that runs the graph of an ONNX model on one device, operator by operator."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from autopar.errors import ModelError
from autopar.ir.graph import Graph, Operator, Ref, Role, Tensor

from .graph_run import last_uses, run_operators

_NORMALIZATIONS = frozenset(
    f"aten.{name}_norm.default" for name in ("layer", "rms", "batch", "group")
)
_RAW: Mapping[str, tuple[type[np.generic], torch.dtype]] = {
    "bfloat16": (np.uint16, torch.bfloat16),
    **{
        name: (np.uint8, getattr(torch, name))
        for name in (
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
    },
}
# If values of inputs decide the sizes of outputs, the graph holds the sizes that the model file
# declares.
_SIZED_BY_VALUES = frozenset(
    {"aten.nonzero.default", "aten.unique_dim.default", "autopar.non_max_suppression"}
)
# Elements narrower than a byte, and the types that hold them.
_NARROW = {
    "int4": torch.int8,
    "int2": torch.int8,
    "uint4": torch.uint8,
    "uint2": torch.uint8,
    "float4_e2m1fn": torch.float8_e4m3fn,
}


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A copy of a numpy array, bfloat16, float8 and elements narrower than a byte included."""
    if array.dtype.name in _NARROW:
        return torch.from_numpy(array.astype(np.float32)).to(_NARROW[array.dtype.name])
    if array.dtype.name in _RAW:
        raw, dtype = _RAW[array.dtype.name]
        return torch.from_numpy(np.array(array).view(raw)).view(dtype)
    return torch.from_numpy(np.array(array))


def fresh_tensor(
    tensor: Tensor, seed: int, *, scale: bool = False, statistic: str = ""
) -> torch.Tensor:
    """Initial values of a stored tensor, the same for one seed and name wherever they are drawn.

    Matrices and kernels are normal with a deviation scaled by the fan-in, scales of norms lie near
    1, variances are positive.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode(), seed & 0xFFFFFFFF))
    dtype = getattr(torch, tensor.dtype)
    if not tensor.is_float:
        return torch.zeros(tensor.shape, dtype=dtype)
    values = torch.randn(tensor.shape, generator=generator)
    fan_in = 0
    if len(tensor.shape) >= 3:
        fan_in = math.prod(tensor.shape[1:])
    elif len(tensor.shape) == 2:
        # ONNX files hold matrices either way around.
        fan_in = min(tensor.shape)
    # By the root of the fan-in, so that activations neither grow nor vanish with the depth.
    values = values / math.sqrt(fan_in) if fan_in else values * 0.02
    if statistic == "running_var":
        # A variance must be positive.
        values = 1 + values.abs()
    elif scale:
        values = 1 + values
    return values.to(dtype)


def _uses(graph: Graph) -> dict[str, tuple[str, str]]:
    """The kind and the formal name for every tensor that a normalisation takes."""
    uses: dict[str, tuple[str, str]] = {}
    for operator in graph.operators:
        if operator.kind in _NORMALIZATIONS:
            for formal, value in operator.attributes.items():
                if isinstance(value, Ref):
                    uses.setdefault(operator.inputs[value.index], (operator.kind, formal))
    return uses


def fresh_weights(graph: Graph, seed: int = 0) -> Iterable[tuple[str, torch.Tensor]]:
    """Initial values of every stored tensor whose value is not in the graph."""
    uses = _uses(graph)
    for tensor in graph.tensors.values():
        if tensor.role in (Role.PARAMETER, Role.CONSTANT) and tensor.name not in graph.constants:
            _, formal = uses.get(tensor.name, ("", ""))
            yield (
                tensor.name,
                fresh_tensor(tensor, seed, scale=formal == "weight", statistic=formal),
            )


class OnnxModule(torch.nn.Module):
    """The model of an imported ONNX graph; its parameters carry the names of the initializers."""

    def __init__(
        self,
        graph: Graph,
        weights: Iterable[tuple[str, np.ndarray | torch.Tensor]] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.graph = graph
        self._keys: dict[str, str] = {}
        self._last_use = last_uses(graph)
        for name, array in graph.constants.items():
            self._store(name, to_torch(array))
        for name, value in fresh_weights(graph, seed) if weights is None else weights:
            if name in graph.tensors and name not in graph.constants:
                self._store(name, value if isinstance(value, torch.Tensor) else to_torch(value))
        stored = [
            t.name for t in graph.tensors.values() if t.role in (Role.PARAMETER, Role.CONSTANT)
        ]
        missing = [name for name in stored if name not in self._keys]
        if missing:
            raise ModelError(
                f"no values are given for {len(missing)} tensors: {', '.join(missing[:10])}"
            )

    def _store(self, name: str, value: torch.Tensor) -> None:
        tensor = self.graph.tensors[name]
        if tuple(value.shape) != tensor.shape:
            raise ModelError(
                f"the tensor {name!r} has the shape {tuple(value.shape)}, "
                f"the graph says {tensor.shape}"
            )
        # torch allows no dots in names, and two tensors may differ by a dot and a slash.
        key = name.replace(".", "/")
        count = 0
        while key in self._keys.values() or hasattr(self, key):
            count += 1
            key = f"{name.replace('.', '/')}#{count}"
        self._keys[name] = key
        if tensor.trainable:
            self.register_parameter(key, torch.nn.Parameter(value))
        else:
            self.register_buffer(key, value)

    def _check_sizes(self, operator: Operator, results: tuple[torch.Tensor, ...]) -> None:
        if operator.kind not in _SIZED_BY_VALUES:
            return
        for name, value in zip(operator.outputs, results, strict=False):
            declared = self.graph.tensors[name].shape
            if tuple(value.shape) != declared:
                raise ModelError(
                    f"{operator.name!r} ({operator.kind}) makes {name!r} of the shape "
                    f"{tuple(value.shape)} from these inputs, the model declares {declared}"
                )

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by their names in the graph."""
        return {name: getattr(self, key) for name, key in self._keys.items()}

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's outputs, in the order of the file."""
        if len(inputs) != len(self.graph.inputs):
            raise ModelError(
                f"the model takes {len(self.graph.inputs)} inputs "
                f"({', '.join(self.graph.inputs)}), not {len(inputs)}"
            )
        tensors = self.named_tensors()
        for name, value in zip(self.graph.inputs, inputs, strict=True):
            if tuple(value.shape) != self.graph.tensors[name].shape:
                raise ModelError(
                    f"the input {name!r} has the shape {tuple(value.shape)}, "
                    f"the graph says {self.graph.tensors[name].shape}"
                )
            tensors[name] = value
        run_operators(self.graph, tensors, self._last_use, self._check_sizes)
        return tuple(tensors[name] for name in self.graph.outputs)
