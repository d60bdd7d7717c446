"""Imports a PyTorch model as a `Graph`.

`torch.export` runs on fake tensors, so no weight is allocated or computed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import ModelError
from autopar.ir import needed_operators
from autopar.model import TorchModel

from .caches import on_one_device
from .export import export_fake, export_folded
from .folding import folding_of
from .known_arguments import KnownArguments
from .no_grad import detach_regions, give_back_inputs
from .passes import with_facts
from .reader import Reader, simplified
from .reads import all_that_can_be_read, of_its_code, recorded_reads
from .unfolding import Layer, unfolded


def import_torch(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    alone: bool = False,
) -> TorchModel:
    """Export `module` on (fake copies of) its example inputs and read the graph.

    `loss`: the graph also computes `loss(outputs, *args, **kwargs)`, a scalar, and names it as its
    loss. `dtype`: the type of floats in the graph; the module itself keeps its type. `alone`: what
    the module gives beside a scalar is left out, and None to its caller.
    Equal layers are exported once.
    """
    forward = module.forward
    own = vars(module).get("forward")
    if loss is not None:
        module.forward = lambda *a, **k: _with_loss(forward, loss, a, k)
    name = type(module).__name__
    given = (tuple(args), dict(kwargs or {}))

    def imported() -> TorchModel:
        try:
            return _folded(module, *given, dtype, name)
        except ModelError as reason:
            exported, reads = _exported(module, *given, dtype)
            model = _as_exported(exported, module, name)
            return replace(model, reads=reads, unfolded=str(reason))

    try:
        model = with_facts(module, imported)
    finally:
        if loss is not None:
            del module.forward
            if own is not None:
                module.forward = own
    model = _simplified(_alone(model) if alone and loss is None else model)
    if loss is None:
        return model
    last = model.output_names[-1]
    if last is None or model.graph.tensors[last].shape != ():
        raise ModelError("the loss function must return a scalar tensor")
    return replace(model, graph=replace(model.graph, loss=last))


def _folded(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    name: str,
) -> TorchModel:
    """The model by calls of its layers; `ModelError` where these cannot be exported apart."""
    with (
        on_one_device(module),
        recorded_reads(module) as reads,
        folding_of(module, reads) as folding,
    ):
        program, programs = export_folded(module, args, kwargs, dtype, folding)
        outer = _as_exported(program, module, name)
        models = {
            # In each kind once: the same work on all of the layers would take as many times.
            kind.path: _simplified(_as_exported(of_kind, kind.layer, kind.path))
            for kind, of_kind in zip(folding.kinds, programs, strict=True)
        }
    layers = [
        Layer(path=path, model=models[kind.path], reads=kind.read) for path, kind in folding.places
    ]
    return unfolded(replace(outer, reads=of_its_code(reads)), layers)


def _exported(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
) -> tuple[torch.export.ExportedProgram, dict[str, frozenset[str]]]:
    """The exported program, and the attributes on which it rests."""
    with on_one_device(module):
        try:
            with recorded_reads(module) as reads:
                program = export_fake(module, args, kwargs, dtype, KnownArguments())
                return program, of_its_code(reads)
        except ModelError as error:
            # Regions that torch compiles inside an export (`torch.cond`) cannot be watched.
            try:
                return export_fake(module, args, kwargs, dtype), all_that_can_be_read(module)
            except ModelError:
                raise error from None


def _with_loss(
    forward: Callable[..., Any],
    loss: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    outputs = forward(*args, **kwargs)
    return outputs, loss(outputs, *args, **kwargs)


def read_exported(
    exported: torch.export.ExportedProgram, *, module: torch.nn.Module | None, name: str
) -> TorchModel:
    """Read an exported program.

    `module` (where there is one) tells which parameters are trainable and tied.
    """
    return _simplified(_as_exported(exported, module, name))


def _alone(model: TorchModel) -> TorchModel:
    """The model without its outputs beside the first scalar; as it is where it has none."""
    graph = model.graph
    scalars = [name for name in graph.outputs if graph.tensors[name].shape == ()]
    loss = next((name for name in scalars if graph.tensors[name].is_float), None)
    if loss is None:
        return model
    operators = needed_operators(graph.operators, [loss, *graph.updates.values()])
    return replace(
        model,
        graph=replace(graph, outputs=(loss,), operators=operators),
        output_names=tuple(name if name == loss else None for name in model.output_names),
        left_out=tuple(name for name in graph.outputs if name != loss),
    )


def _simplified(model: TorchModel) -> TorchModel:
    return replace(model, graph=simplified(model.graph, model.constants))


def _as_exported(
    exported: torch.export.ExportedProgram, module: torch.nn.Module | None, name: str
) -> TorchModel:
    give_back_inputs(exported)
    reader = Reader(exported, module, name)
    try:
        return reader.read()
    except ModelError:
        if not reader.hazards:
            raise
    detach_regions(exported)
    # With an empty table this decomposes nothing and only makes writes into views functional.
    try:
        plain = exported.run_decompositions({})
    except RuntimeError as error:  # such as a constant that the code changes in place
        text = str(error).strip().split("\n")[0]
        raise ModelError(f"torch.export cannot capture {type(module).__name__}: {text}") from error
    return Reader(plain, module, name).read()
