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
FORM = "a function that returns a dict of 'module', 'inputs', 'parallelize', and perhaps 'loss' and 'mesh'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case.

    `parallelize(module, mesh)` shards a copy of the `module` in place, or returns the one to use. `mesh`: sizes of the
    device mesh. `loss(module, *inputs)`: a scalar, of the whole and of the sharded module; by default the mean of the
    squared outputs.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    parallelize: Sharding
    loss: Loss | None = None
    mesh: tuple[int, ...] = (2,)


def case_named(text: str, ranks: int | None = None) -> Case:
    """The case that `package.module:function` returns."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{text!r} is not of the form package.module:function; it names {FORM}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"{module_name} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [found for found in vars(module) if not found.startswith("_") and callable(getattr(module, found))]
        raise UsageError(unknown(f"function of {module_name}", name, public))
    return made_case(text, function(), ranks)


def made_case(name: str, given: Any, ranks: int | None = None) -> Case:
    """The case of what a function returned."""
    if not isinstance(given, Mapping) or not {"module", "inputs", "parallelize"} <= set(given):
        raise UsageError(f"{name} returned {type(given).__name__}; it must be {FORM}")
    wrong = set(given) - {"module", "inputs", "parallelize", "loss", "mesh"}
    if wrong:
        raise UsageError(f"{name}: " + unknown("key", sorted(wrong)[0], ("module", "inputs", "parallelize", "loss", "mesh")))
    if not isinstance(given["module"], nn.Module) or not callable(given["parallelize"]):
        raise UsageError(f"{name}: 'module' must be a torch.nn.Module, and 'parallelize' a function of a module and a device mesh")
    inputs = given["inputs"] if isinstance(given["inputs"], tuple | list) else (given["inputs"],)
    mesh = tuple(given.get("mesh") or (ranks or 2,))
    if ranks is not None and torch.Size(mesh).numel() != ranks:
        raise UsageError(f"{name} is for a mesh of {' x '.join(map(str, mesh))}, not for {ranks} ranks")
    return Case(
        name=name, module=given["module"], inputs=tuple(inputs), parallelize=given["parallelize"], loss=given.get("loss"), mesh=mesh
    )  # fmt: skip


def mean_of_squares(module: nn.Module, *inputs: Any) -> Tensor:
    """A loss on which every output has a say."""
    outputs = [value for value in tree_leaves(module(*inputs)) if isinstance(value, Tensor) and value.is_floating_point()]
    if not outputs:
        raise UsageError("the module gives no floating-point output: give 'loss'")
    return torch.stack([value.square().mean() for value in outputs]).sum()


def styles_case(path: str | Path, name: str, module: nn.Module, inputs: tuple[Any, ...], ranks: int) -> Case:
    """The case of a Hugging Face tensor-parallel plan (JSON: styles by module pattern), as torch's parallel styles."""
    try:
        styles = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(styles, dict) or not styles or not all(isinstance(style, str) for style in styles.values()):
        raise UsageError(f"{path}: holds no styles by module pattern")
    known = _styles()
    for style in styles.values():
        if style not in known:
            raise UsageError(f"{path}: " + unknown("style", style, known))

    def parallelize(sharded: nn.Module, mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.tensor.parallel import parallelize_module

        return parallelize_module(sharded, mesh, {pattern: known[style]() for pattern, style in styles.items()})

    return Case(name=name, module=module, inputs=inputs, parallelize=parallelize, mesh=(ranks,))


def _styles() -> dict[str, Callable[[], Any]]:
    """Torch's classes for the styles; it has none for packed ones, which split each part of a fused weight."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def gathered() -> Any:
        return ColwiseParallel(output_layouts=Replicate())

    return {
        "colwise": ColwiseParallel, "colwise_gather_output": gathered, "colwise_rep": gathered, "rowwise": RowwiseParallel,
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()), "sequence_parallel": SequenceParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()), "embedding_colwise": gathered,
    }  # fmt: skip
