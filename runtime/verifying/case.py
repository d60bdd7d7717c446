"""The case to verify: a module, example inputs, a function that shards the module, and a loss."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from autopar.errors import UsageError, unknown

Loss = Callable[..., Tensor]
Sharding = Callable[[nn.Module, DeviceMesh], Any]
FORM = (
    "a function that returns a dict of 'module', 'inputs', 'parallelize',"
    " and perhaps 'loss' and 'mesh'"
)
_KEYS = ("module", "inputs", "parallelize", "loss", "mesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sharding to verify.

    `parallelize(module, mesh)` shards a copy of the `module` in place, or returns the one to use.
    `mesh`: sizes of the device mesh. `loss(outputs, *inputs)`: a scalar, as of `autopar.plan`,
    of the whole and of the sharded module; by default the mean of the squared outputs.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    parallelize: Sharding
    loss: Loss | None = None
    mesh: tuple[int, ...] = (2,)

    def loss_of(self, module: nn.Module) -> Tensor:
        """The loss of the module's outputs on the case's inputs."""
        outputs = module(*self.inputs)
        return self.loss(outputs, *self.inputs) if self.loss else mean_of_squares(outputs)


def case_named(text: str, ranks: int | None = None) -> Case:
    """The case that `package.module:function` returns."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{text!r} is not of the form package.module:function; it names {FORM}")
    # As `python -m` does: modules of the present directory can be imported.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"{module_name} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [
            word
            for word, value in vars(module).items()
            if not word.startswith("_") and callable(value)
        ]
        raise UsageError(unknown(f"function of {module_name}", name, public))
    return made_case(text, function(), ranks)


def made_case(name: str, parts: Any, ranks: int | None = None) -> Case:
    """The case of the parts that a function returned."""
    if not isinstance(parts, Mapping) or not {"module", "inputs", "parallelize"} <= set(parts):
        raise UsageError(f"{name} returned {type(parts).__name__}; it must be {FORM}")
    wrong = sorted(set(parts) - set(_KEYS))
    if wrong:
        raise UsageError(f"{name}: " + unknown("key", wrong[0], _KEYS))
    if not isinstance(parts["module"], nn.Module) or not callable(parts["parallelize"]):
        raise UsageError(
            f"{name}: 'module' must be a torch.nn.Module,"
            " and 'parallelize' a function of a module and a device mesh"
        )
    inputs = parts["inputs"] if isinstance(parts["inputs"], tuple | list) else (parts["inputs"],)
    mesh = tuple(parts.get("mesh") or (ranks or 2,))
    if ranks is not None and torch.Size(mesh).numel() != ranks:
        raise UsageError(
            f"{name} is for a mesh of {' x '.join(map(str, mesh))}, not for {ranks} ranks"
        )
    return Case(
        name=name,
        module=parts["module"],
        inputs=tuple(inputs),
        parallelize=parts["parallelize"],
        loss=parts.get("loss"),
        mesh=mesh,
    )


def mean_of_squares(outputs: Any) -> Tensor:
    """The mean of the squares of every output, summed: a loss to which each of them adds."""
    outputs = [
        value
        for value in tree_leaves(outputs)
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    if not outputs:
        raise UsageError("the module gives no floating-point output: give 'loss'")
    return torch.stack([value.square().mean() for value in outputs]).sum()


def styles_case(
    path: str | Path, name: str, module: nn.Module, inputs: tuple[Any, ...], ranks: int
) -> Case:
    """The case of a Hugging Face tensor-parallel plan, by torch's parallel styles.

    The plan is JSON: styles by module pattern.
    """
    try:
        styles = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(styles, dict) or not styles:
        raise UsageError(f"{path}: holds no styles by module pattern")
    if not all(isinstance(style, str) for style in styles.values()):
        raise UsageError(f"{path}: holds no styles by module pattern")
    known = _styles()
    for style in styles.values():
        if style not in known:
            raise UsageError(f"{path}: " + unknown("style", style, known))

    def parallelize(sharded: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Give every module of a pattern its style."""
        from torch.distributed.tensor.parallel import parallelize_module

        by_pattern = {pattern: known[style]() for pattern, style in styles.items()}
        return parallelize_module(sharded, mesh, by_pattern)

    return Case(name=name, module=module, inputs=inputs, parallelize=parallelize, mesh=(ranks,))


def _styles() -> dict[str, Callable[[], Any]]:
    """Torch's classes for the styles.

    It has none for packed styles, which split each part of a fused weight.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def gathered() -> Any:
        """Columns whose results are gathered at once."""
        return ColwiseParallel(output_layouts=Replicate())

    return {
        "colwise": ColwiseParallel,
        "colwise_gather_output": gathered,
        "colwise_rep": gathered,
        "rowwise": RowwiseParallel,
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": gathered,
    }
