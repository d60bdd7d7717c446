"""Proves the import of an ONNX file: outputs by another runtime, gradients by differences.

outputs    those of onnxruntime, or of onnx's reference evaluator where that is missing
gradients  (f(p + e d) - f(p - e d)) / 2 e = <gradient of f, d>, in float64, for directions d of a
           few drawn elements of every parameter; where two e disagree, f has a jump, and tells
           nothing
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from autopar.frontends.onnx import has_weights, read_model, specialised
from autopar.ir import Graph, Operator
from autopar.ir.dtype import cast_graph
from autopar.model import LoadedModel
from autopar.runtime.checking.differences import Observation, differences
from autopar.runtime.models.example_inputs import with_values
from autopar.runtime.models.graph_run import Watch, last_uses, run_operators
from autopar.runtime.models.model_values import model_values

from .sides import weighed
from .trials import STORED_BYTES, NoTrial

Tensors = Mapping[str, Tensor]

SIZES = 4
"""The size of named dims in a trial, but for the batch."""
SAMPLES = 2
ELEMENTS = 32
"""The elements of each parameter that a direction moves."""
STEPS = (1e-6, 2.5e-7)
AGREE = 1e-4
"""The relative error of differences, from rounding and the curve of a function."""
REFERENCE_ELEMENTS = 2**24
"""The most parameters of a model that onnx's evaluator, in Python, is given."""


def onnx_trial(model: LoadedModel) -> tuple[LoadedModel, str]:
    """The model at small sizes where they are open, with inputs; and its sizes in words."""
    stored = sum(tensor.bytes for tensor in model.source.parameters)
    if stored > STORED_BYTES:
        raise NoTrial(f"it has {stored / 2**30:.1f} GiB of parameters, more than a trial may")
    assert model.at_sizes is not None
    try:
        small = model.at_sizes(None, (SAMPLES, SIZES))
    except ValueError:
        # Some files compute sizes that only fit others.
        small = model
    shapes = (small.source.tensors[name].shape for name in small.source.inputs)
    said = ", ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
    return with_values(small, 0), f"inputs of {said}"


def onnx_difference(model: LoadedModel) -> str:
    """The first difference of an ONNX file and its graph, in words; "" where there is none."""
    graph = model.source
    stored = _stored(model)
    assert model.inputs is not None
    inputs = dict(zip(graph.inputs, model.inputs, strict=True))
    made = _run(graph, {**stored, **inputs})
    wanted = _reference(model, stored, inputs, graph.outputs)
    if missing := [name for name in graph.outputs if name not in wanted]:
        raise NoTrial(f"the file has no tensor of the name {missing[0]!r}")
    report = differences(_outputs(wanted), _outputs(made), graph=graph, optimizer="none")
    wrong = next((entry for entry in report.entries if not entry.passed), None)
    if wrong is not None and (place := _first_operator(model, stored, inputs)) is not None:
        return f"the output {wrong.tensor!r} differs by {wrong.error:.1e} of its largest{place}"
    return _wrong_gradient(graph, stored, inputs)


def _stored(model: LoadedModel) -> dict[str, Tensor]:
    values = model_values(model)
    return {name: v if isinstance(v, Tensor) else v() for name, v in values.items()}


def _run(graph: Graph, tensors: Tensors, watch: Watch | None = None) -> Tensors:
    """The outputs of a graph."""
    present = dict(tensors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run_operators(graph, present, last_uses(graph), watch)
    return {name: present[name] for name in graph.outputs}


def _outputs(values: Mapping[str, Tensor]) -> Observation:
    stored = {name: value.detach() for name, value in values.items()}
    return Observation(outputs=stored, losses=(), gradients={}, smallest={}, largest={}, weights={})


def _reference(
    model: LoadedModel, stored: Tensors, inputs: Tensors, names: Iterable[str]
) -> dict[str, Tensor]:
    """The tensors of the file among `names`, as another runtime computes them."""
    if any(value.dtype is torch.bfloat16 for value in inputs.values()):
        raise NoTrial("numpy has no bfloat16, which its inputs are of")
    given = {name: value.numpy() for name, value in inputs.items()}
    read, folder = read_model(model.file)
    read = specialised(read, model.values, model.outputs)
    proto = onnx.ModelProto()
    proto.CopyFrom(read)
    known = {output.name for output in proto.graph.output}
    names = sorted({*names} & (known | {name for node in proto.graph.node for name in node.output}))
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    if not has_weights(model.file):
        for tensor in proto.graph.initializer:
            if tensor.name in stored:
                tensor.raw_data = stored[tensor.name].numpy().tobytes()
    made = _evaluated(proto, folder, given, names)
    return {
        name: torch.from_numpy(np.array(value))
        for name, value in zip(names, made, strict=True)
        if isinstance(value, np.ndarray | np.generic)
    }


def _evaluated(proto: Any, folder: Any, given: Mapping[str, Any], names: list[str]) -> Any:
    try:
        if importlib.util.find_spec("onnxruntime") is not None:
            return _by_onnxruntime(proto, folder, given, names)
        from onnx.reference import ReferenceEvaluator

        elements = sum(int(np.prod(t.dims)) for t in proto.graph.initializer)
        if elements > REFERENCE_ELEMENTS:
            raise NoTrial("onnxruntime is not installed, and it is large for onnx's evaluator")
        return ReferenceEvaluator(proto).run(names, dict(given))
    except NoTrial:
        raise
    except Exception as error:  # each runtime has errors of its own
        words = str(error).strip().split("\n")[0]
        raise NoTrial(f"no other runtime runs it here: {type(error).__name__}: {words}") from error


def _by_onnxruntime(proto: Any, folder: Any, given: Mapping[str, Any], names: list[str]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Fused and folded operators would have other roundings, and take longer to make.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if folder is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(names, dict(given))


def _first_operator(model: LoadedModel, stored: Tensors, inputs: Tensors) -> str | None:
    """The first operator whose value is not the file's, in words.

    Each operator reads the file's values where they are known. So None says that all compute
    alike, and that the model makes more of their roundings than a tolerance allows.
    """
    graph = model.source
    try:
        made = (name for operator in graph.operators for name in operator.outputs)
        theirs = _reference(model, stored, inputs, made)
    except NoTrial:
        return ""
    differing: list[Operator] = []

    def seen(operator: Operator, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        made = dict(zip(operator.outputs, results, strict=False))
        wanted = {name: theirs[name] for name in made if name in theirs}
        ours = {name: made[name] for name in wanted}
        report = differences(_outputs(wanted), _outputs(ours), optimizer="none", graph=graph)
        if not report.passed:
            differing.append(operator)
        return tuple((made | wanted).values())

    _run(graph, {**stored, **inputs}, seen)
    if not differing:
        return None
    first = differing[0]
    return f"; the first operator with another value is {first.name!r} ({first.kind})"


def _wrong_gradient(graph: Graph, stored: Tensors, inputs: Tensors) -> str:
    """The first parameter whose gradient differs from differences of the loss, in words."""
    names = [tensor.name for tensor in graph.parameters if tensor.trainable]
    floats = {**stored, **inputs}
    wide = {n: v.double() if v.is_floating_point() else v for n, v in floats.items()}
    try:
        cast = cast_graph(graph, "float64")
        for name in names:
            wide[name] = wide[name].detach().requires_grad_(True)
        total = _total(cast, wide)
        if total is None or not total.requires_grad:
            return ""
        given = torch.autograd.grad(total, [wide[name] for name in names], allow_unused=True)
    except RuntimeError as error:
        raise NoTrial(f"it does not run in float64: {str(error).splitlines()[0]}") from error
    gradients = dict(zip(names, given, strict=True))
    directions = {name: _direction(wide[name], place) for place, name in enumerate(names)}
    if _agree(cast, wide, gradients, directions):
        return ""
    for name in names:
        if not _agree(cast, wide, gradients, {name: directions[name]}):
            first = next(op for op in graph.operators if name in op.inputs)
            return (
                f"the gradient of {name!r} is not the slope of the outputs; its first reader is "
                f"{first.name!r} ({first.kind})"
            )
    return ""


def _direction(value: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Drawn places in a tensor, and how far each is moved."""
    draw = torch.Generator().manual_seed(place)
    places = torch.randint(value.numel(), (min(ELEMENTS, value.numel()),), generator=draw)
    places = torch.unique(places)
    return places, torch.randn(places.shape, generator=draw, dtype=torch.float64)


def _agree(
    graph: Graph,
    tensors: Tensors,
    gradients: Mapping[str, Tensor | None],
    directions: Mapping[str, tuple[Tensor, Tensor]],
) -> bool:
    """Whether the gradients tell how the total changes along all directions at once."""
    told = 0.0
    size = 0.0
    for name, (places, moves) in directions.items():
        gradient = gradients[name]
        if gradient is not None:
            told += float((gradient.flatten()[places] * moves).sum())
            size += float((gradient.flatten()[places] * moves).abs().sum())
    slopes = [_slope(graph, tensors, directions, step) for step in STEPS]
    near = AGREE * max(size, max(map(abs, slopes)), 1e-9)
    if abs(slopes[0] - slopes[1]) > near:
        return True
    return abs(slopes[1] - told) <= 3 * near


@torch.no_grad()
def _slope(
    graph: Graph, tensors: Tensors, directions: Mapping[str, tuple[Tensor, Tensor]], step: float
) -> float:
    totals = []
    flat = {name: tensors[name].view(-1) for name in directions}
    before = {name: flat[name][places] for name, (places, _) in directions.items()}
    for side in (step, -step):
        for name, (places, moves) in directions.items():
            flat[name][places] = before[name] + side * moves
        total = _total(graph, tensors)
        assert total is not None
        totals.append(float(total))
    for name, (places, _) in directions.items():
        flat[name][places] = before[name]
    return (totals[0] - totals[1]) / (2 * step)


def _total(graph: Graph, tensors: Tensors) -> Tensor | None:
    outputs = _run(graph, tensors)
    made = [outputs[name] for name in graph.outputs]
    return weighed([value if value.is_floating_point() else None for value in made])
