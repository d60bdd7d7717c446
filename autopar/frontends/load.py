"""Recognises a user's MODEL and imports it.

A MODEL is an ONNX file, a `torch.export` archive, a module, or a function that makes one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, ModelError, UsageError, unknown
from autopar.file_limits import TENSOR_BYTES
from autopar.ir import Graph, with_loss
from autopar.ir.dtype import FLOATS, cast_graph
from autopar.ir.recipes import PLAIN, recipe_named, with_precision
from autopar.model import Check, Imported, LoadedModel, TorchModel
from autopar.units import bytes_text

ONNX_ENDINGS = (".onnx", ".onnxtxt", ".textproto")
BESIDE = "bfloat16"
"""The type of all that a recipe of precision leaves as it is."""


LOSS_ALONE = ("loss",)
"""The `outputs` of a PyTorch model in training that gives no others."""
LARGE = 2**28
"""Bytes of outputs beside a loss that are worth telling of."""
LEFT_OUT = "its outputs beside the loss, such as logits, are left out: a call gives None for them"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options for reading a model: sizes of symbolic dims, batch, floating-point type, and loss.

    `precision`: the recipe of products (`autopar.ir.recipes`).

    Parameters among the stored floats of an ONNX model: `frozen` ones are not, `trained` ones are;
    or exactly `parameters`. `trust`: whether a `.pt2` file may execute code that it holds.
    `proof`: as of `LoadedModel`. `values` and `outputs`: of an ONNX model, as of `LoadedModel`;
    `LOSS_ALONE` leaves out what a PyTorch model gives beside its loss, if it gives one.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch: int | None = None
    dtype: str | None = None
    precision: str | None = None
    loss: str | Callable[..., Any] | None = None
    train: bool = True
    frozen: Sequence[str] = ()
    trained: Sequence[str] = ()
    parameters: Collection[str] | None = None
    trust: bool = False
    proof: bool | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()

    @property
    def loss_alone(self) -> bool:
        """Whether a PyTorch model in training gives its loss alone."""
        return tuple(self.outputs) == LOSS_ALONE

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOATS:
            raise UsageError(unknown("dtype", self.dtype, FLOATS))
        recipe_named(self.precision)
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch is {self.batch}; it must be at least 1")


def options_asked(**values: Any) -> ModelOptions:
    """The options that a user gives: beside a precision the type is bfloat16 unless given.

    Raise `UsageError` where the two contradict each other.
    """
    options = ModelOptions(**values)
    if options.precision == PLAIN and options.dtype not in (None, BESIDE):
        raise UsageError(f"--precision {PLAIN} is --dtype {BESIDE}, not --dtype {options.dtype}")
    narrow = options.precision is not None and options.dtype is None
    return replace(options, dtype=BESIDE) if narrow else options


def load_model(model: Any, options: ModelOptions, example_inputs: Any = None) -> LoadedModel:
    """Import `model`, in any form that a user may give.

    The forms are a path, a `package.module:function` text, an `onnx.ModelProto` and a
    `torch.nn.Module`.
    """
    if isinstance(model, (str, Path)):
        text = str(model)
        if text.endswith(ONNX_ENDINGS):
            return _onnx(text, options)
        if text.endswith(".pt2"):
            return _archive(text, options)
        if ":" in text:
            module, example_inputs = call_function(text)
            return _module(module, example_inputs, options)
        inside = Path(text) / "config.json"
        named = str(inside) if inside.is_file() else text
        hint = f", or hf:{named} for a configuration's model" if named.endswith(".json") else ""
        raise UsageError(
            f"{text!r} is no model: give FILE.onnx, FILE.pt2 or package.module:function{hint}"
        )
    if type(model).__name__ == "ModelProto":
        return _onnx(model, options)
    if hasattr(model, "named_parameters"):
        if example_inputs is None:
            raise UsageError(
                "a torch module needs example inputs: autopar.plan(module, (input, ...), ...)"
            )
        return _module(model, example_inputs, options)
    raise UsageError(
        f"a model is a path, an onnx.ModelProto or a torch.nn.Module, not {type(model).__name__}"
    )


def _onnx(model: Any, options: ModelOptions) -> LoadedModel:
    from .onnx import Roles, import_onnx, missing_weights

    if options.loss is not None:
        raise UsageError(
            "--loss applies to PyTorch models; an ONNX model's loss is its scalar output, or the "
            "mean square of its outputs"
        )
    roles = Roles(
        frozen=tuple(options.frozen), trained=tuple(options.trained), exactly=options.parameters
    )
    lost: list[str] = []

    def seen(proto: Any, folder: Path | None) -> None:
        lost.append(missing_weights(proto, folder))

    graph = import_onnx(
        model,
        dims=options.dims,
        batch=options.batch,
        shapes=options.shapes,
        roles=roles,
        values=options.values,
        outputs=options.outputs,
        seen=seen,
    )
    graph = cast_graph(graph, options.dtype) if options.dtype else graph
    notes = tuple(f"{text}; planning needs no weights, running does" for text in lost if text)
    return LoadedModel(
        graph=finished(graph, options),
        source=graph,
        weights=lambda: _onnx_weights(model),
        notes=notes,
        dtype=options.dtype,
        precision=options.precision,
        file=model,
        at_sizes=lambda _, sizes, typed=False: _onnx(model, _at_most(options, *sizes)),
        proof=options.proof,
        values=options.values,
        outputs=tuple(options.outputs),
    )


def _require_whole(options: ModelOptions) -> None:
    if options.values or (options.outputs and not options.loss_alone):
        raise UsageError(
            "--value and --outputs apply to ONNX models; a PyTorch model takes and gives what it "
            "is written to, or its loss alone (--outputs loss)"
        )


def _at_most(options: ModelOptions, batch: int, size: int) -> ModelOptions:
    """The options with a smaller batch and smaller named dims, and the file's own types."""
    return replace(
        options,
        batch=None if options.batch is None else min(options.batch, batch),
        dims={name: min(given, size) for name, given in options.dims.items()},
        dtype=None,
        precision=None,
    )


def _onnx_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """The stored tensors, one at a time; none where the file has no data.

    Files that it names must be there.
    """
    from .onnx import has_weights, load_weights, missing_weights, read_model

    if lost := missing_weights(*read_model(model)):
        raise ModelError(f"{lost}; put it beside the model")
    return load_weights(model) if has_weights(model) else iter(())


def finished(graph: Graph, options: ModelOptions) -> Graph:
    """The graph of an imported model with a loss where it is trained and has none of its own."""
    if (total := sum(tensor.bytes for tensor in graph.tensors.values())) >= TENSOR_BYTES:
        largest = max(graph.tensors.values(), key=lambda tensor: tensor.bytes)
        raise ModelError(
            f"the tensors of {graph.name} have {total} bytes, {largest.name!r} alone "
            f"{largest.bytes}: too many to be counted"
        )
    graph = with_precision(graph, options.precision)
    return with_loss(graph, _trained_outputs(graph)) if options.train else graph


def _trained_outputs(graph: Graph) -> list[str]:
    """Outputs that depend on a trainable parameter."""
    warm = {tensor.name for tensor in graph.parameters if tensor.trainable}
    for op in graph.operators:
        if any(name in warm for name in op.inputs):
            warm.update(op.outputs)
    return [name for name in graph.outputs if name in warm]


def _function(text: str) -> Any:
    name, _, attribute = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        target: Any = importlib.import_module(name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"{text!r} cannot be imported: {error}") from error
    return target


def call_function(text: str) -> tuple[Any, Any]:
    """The module and example inputs that `package.module:function` returns."""
    function = _function(text)
    form = f"{text!r} must be a function without arguments that returns (module, example_inputs)"
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ModelError(f"{form}: {error}") from error
    except ValueError:
        # `inspect` knows no arguments of some functions written in C. The call below tells whether
        # they have any.
        pass
    try:
        result = function()
    except AutoparError:
        raise
    except Exception as error:
        # The function is the user's, so any error of it is about the model, with its place.
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
        raise ModelError(f"{text!r} failed: {type(error).__name__}: {error}{where}") from error
    if not (
        isinstance(result, tuple) and len(result) == 2 and hasattr(result[0], "named_parameters")
    ):
        raise ModelError(form)
    return result


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _module(module: Any, example_inputs: Any, options: ModelOptions) -> LoadedModel:
    import torch

    if options.dims or options.shapes:
        raise UsageError(
            "--dim and --shape apply to ONNX models; a PyTorch model takes its sizes from the "
            "example inputs (and --batch)"
        )
    _require_whole(options)
    if options.frozen or options.trained:
        raise UsageError(
            "--frozen and --trained apply to ONNX models; a PyTorch parameter says it by "
            "requires_grad"
        )
    args, kwargs = _arguments(example_inputs)
    if options.dtype:
        dtype = getattr(torch, options.dtype)

        def cast(value: torch.Tensor) -> torch.Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
    if options.batch is not None:
        args, kwargs = _rebatch(args, kwargs, options.batch)
    return _imported(module, args, kwargs, options)


def _imported(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: ModelOptions
) -> LoadedModel:
    """Import a module with example inputs of the planned batch and type."""
    import torch

    from .torch import (
        caching,
        import_torch,
        none_of_its_own,
        on_one_device,
        recast,
        with_attributes,
    )

    dtype = getattr(torch, options.dtype) if options.dtype else None
    loss = _function(options.loss) if isinstance(options.loss, str) else options.loss
    with none_of_its_own(module, train=options.train):
        imported = import_torch(
            module,
            args,
            kwargs,
            loss=loss if options.train else None,
            dtype=dtype,
            alone=options.train and options.loss_alone,
        )
    imported = replace(imported, graph=with_attributes(imported.graph, module))
    inputs = tuple(
        leaf
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    )
    record = Imported(torch=imported, inputs=inputs, call=(args, kwargs), calling=on_one_device)
    plain = replace(options, dtype=None, precision=None)
    return LoadedModel(
        graph=finished(imported.graph, options),
        source=imported.graph,
        build=functools.cache(lambda: recast(module, dtype)),
        imported=lambda: record,
        loss=loss if options.train else None,
        notes=tuple(_notes(imported, cached=bool(caching(module)), train=options.train)),
        dtype=options.dtype,
        precision=options.precision,
        given=module,
        proof=options.proof,
        outputs=tuple(options.outputs),
        reload=_reload(args, kwargs, options),
        at_sizes=lambda module, call, typed=True: _imported(
            module, call[0], call[1], options if typed else plain
        ),
    )


def _reload(
    args: tuple[Any, ...], kwargs: dict[str, Any], options: ModelOptions
) -> Callable[..., LoadedModel]:
    """Import another module with these inputs, of which the types are kept, and the shapes too
    unless others are given.
    """
    import torch
    from torch.utils import _pytree as pytree

    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value, device="meta")

    call = pytree.tree_map_only(torch.Tensor, empty, (args, kwargs))

    def reload(module: Any, shapes: Sequence[tuple[int, ...]] | None = None) -> LoadedModel:
        asked = call
        if shapes is not None:
            others = iter(shapes)
            asked = pytree.tree_map_only(
                torch.Tensor, lambda value: value.new_empty(next(others)), call
            )
        return _imported(module, asked[0], asked[1], options)

    return reload


def _notes(imported: TorchModel, *, cached: bool, train: bool) -> Iterator[str]:
    from .torch import NOTE

    if cached:
        yield NOTE
    if imported.left_out:
        yield LEFT_OUT
    outputs = [imported.graph.tensors[name] for name in imported.graph.outputs]
    beside = sum(tensor.bytes for tensor in outputs if tensor.shape)
    if train and beside > LARGE and not all(tensor.shape for tensor in outputs):
        held = f"its outputs beside the loss, {bytes_text(beside)}, are held to the end of a step"
        yield f"{held}: --outputs loss leaves them out"
    if imported.unfolded is not None:
        yield f"every layer is exported on its own, which takes longer: {imported.unfolded}"
    yield from map(_said, imported.checks)


def _said(check: Check) -> str:
    """Tell what is done about an assertion of the model's code."""
    if check.checkable:
        what = "every call's batch is checked"
    else:
        what = "it is not checked, as it needs more than the inputs"
    return f"the model's code asserts something of its data at {check.place}: {what}"


def _rebatch(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat or cut the example inputs along dim 0, the global batch, where they share its size."""
    import torch

    tensors = [
        t
        for t in torch.utils._pytree.tree_leaves((args, kwargs))
        if isinstance(t, torch.Tensor) and t.dim()
    ]
    if not tensors:
        raise UsageError("--batch: the example inputs have no batch dim")
    old = tensors[0].shape[0]

    def fit(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0 or value.shape[0] != old or old == batch:
            return value
        if old:
            return torch.cat([value] * -(-batch // old))[:batch].clone()
        return value.new_zeros((batch, *value.shape[1:]))

    return torch.utils._pytree.tree_map_only(  # type: ignore[no-any-return]
        torch.Tensor, fit, (args, kwargs)
    )


def _archive(text: str, options: ModelOptions) -> LoadedModel:
    from .torch import read_archive

    if options.batch is not None or options.dims or options.shapes:
        raise UsageError(
            f"{text}: an exported archive has fixed sizes; export it again with the batch you want"
        )
    _require_whole(options)
    if options.frozen or options.trained:
        raise UsageError(
            "--frozen and --trained apply to ONNX models; an exported archive tells its parameters "
            "from its buffers"
        )
    if options.outputs:
        raise UsageError(
            f"{text}: an exported archive gives what it was exported with; export a module that "
            "returns its loss alone"
        )
    module, imported = read_archive(text, trust=options.trust)
    notes = tuple(map(_said, imported.checks))
    record = Imported(torch=imported)
    return LoadedModel(
        graph=finished(imported.graph, options),
        source=imported.graph,
        build=lambda: module,
        imported=lambda: record,
        notes=notes,
        precision=options.precision,
        proof=options.proof,
    )
