"""Models named by a configuration alone, `hf:path/config.json`, beside all others."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from .errors import UsageError
from .file_limits import GRAPH_BYTES
from .frontends.huggingface import (
    DTYPE,
    OPTIONS,
    PREFIX,
    Batch,
    Configured,
    File,
    configured,
    content_of,
    drawn,
    example_inputs,
    placed,
    read_configuration,
    small_files,
    small_inputs,
    telling,
    told_sizes,
)
from .frontends.load import LOSS_ALONE, ONNX_ENDINGS, ModelOptions, load_model
from .ir import Graph
from .model import LoadedModel, SmallCopies
from .remembered_models import Asked, Source, content_digest, remembered_model
from .units import count_text

_PACKAGES = ("autopar", "torch", "transformers", "diffusers")


class Sized(Protocol):
    """The shape and the type of a tensor, by names as in torch."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dims."""

    @property
    def dtype(self) -> str:
        """The name of its type."""


def load_any(
    model: Any,
    options: ModelOptions,
    given: Any = None,
    *,
    sizes: Mapping[str, Sized] | None = None,
) -> LoadedModel:
    """`load_model`, which takes `hf:path/config.json` too; models of files are remembered.

    `sizes`: of a configuration's inputs, by name.
    """
    if not is_configuration(model):
        load = partial(load_model, model, options, given)
        if (file := _onnx_file(model)) is None:
            return load()
        return remembered_model(Asked(source=file, options=options), load)
    wrong = [name for name in ("shapes", "trained", "values") if getattr(options, name)]
    wrong += ["outputs"] if options.outputs and not options.loss_alone else []
    valid = OPTIONS.values()
    if wrong or set(options.dims) - set(valid):
        named = ", ".join(f"--{name}" for name in OPTIONS)
        raise UsageError(
            f"{model}: a configuration takes --batch, {named}, --loss, --dtype and --frozen, not "
            f"{', '.join(wrong) or '--dim'}"
        )
    path = str(model).removeprefix(PREFIX)
    return load_configured(
        path, replace(options, frozen=()), given, sizes=sizes, frozen_parameters=options.frozen
    )


def _onnx_file(model: Any) -> Source | None:
    """The ONNX file that a MODEL names, if it is a file that can be one.

    Tensors in files beside it may be constants of its graph.
    """
    if not isinstance(model, str | Path) or not str(model).endswith(ONNX_ENDINGS):
        return None
    path = Path(model)
    if not path.is_file() or path.stat().st_size > GRAPH_BYTES:
        return None

    def besides() -> Sequence[Path]:
        from .frontends.onnx import external_files

        return external_files(path)

    return Source(
        path=str(path),
        content=content_digest(path),
        packages=("autopar", "onnx", "numpy"),
        besides=besides,
        weights=True,
    )


def load_configured(
    path: str,
    options: ModelOptions,
    given: Mapping[str, Any] | None = None,
    *,
    sizes: Mapping[str, Sized] | None = None,
    frozen_parameters: Sequence[str] = (),
    build: Callable[[Configured], Any] = lambda made: made.build(0),
) -> LoadedModel:
    """The model of a configuration, with inputs of the sizes asked for, or those `given`.

    `sizes`: of its inputs. `frozen_parameters`: names or patterns of parameters that are not
    trained. `build` makes the module with its weights.
    """
    options = replace(options, dtype=options.dtype or DTYPE)
    if sizes is None and options.train and options.loss is None:
        # Logits of a whole batch are larger than all that is saved of its layers.
        options = replace(options, outputs=LOSS_ALONE)
    small = _copies(path, options)
    if given is not None:
        return replace(_load(path, options, given, frozen_parameters, build), small=small)

    def load() -> LoadedModel:
        inputs = None if sizes is None else empty_inputs(sizes)
        return _load(path, options, inputs, frozen_parameters, build)

    file = Source(path=path, content=content_of(path), packages=_PACKAGES)
    asked = Asked(source=file, options=options, further=(tuple(frozen_parameters), _told_of(sizes)))

    def as_planned(graph: Graph) -> Asked:
        """The same model, asked for by the inputs of a plan."""
        inputs = {name: graph.tensors[name] for name in graph.inputs}
        batch = next((tensor.shape[0] for tensor in inputs.values() if tensor.shape), None)
        further = (tuple(frozen_parameters), _told_of(inputs))
        return Asked(source=file, options=replace(options, dims={}, batch=batch), further=further)

    equal = as_planned if sizes is None else None
    return replace(remembered_model(asked, load, equal), small=small)


def _told_of(sizes: Mapping[str, Sized] | None) -> Mapping[str, tuple[tuple[int, ...], str]] | None:
    if sizes is None:
        return None
    return {name: (tuple(each.shape), each.dtype) for name, each in sizes.items()}


def _load(
    path: str,
    options: ModelOptions,
    given: Mapping[str, Any] | None,
    frozen_parameters: Sequence[str],
    build: Callable[[Configured], Any],
) -> LoadedModel:
    assert options.dtype is not None
    made = configured(path, options.dtype)
    if given is None:
        has_labels = options.train and options.loss is None
        inputs = example_inputs(made, options.batch or 1, options.dims, labels=has_labels)
        options = replace(options, batch=None)
    else:
        inputs = Batch(given=given)
    told = told_sizes(made, inputs.given)

    def ready(module: Any) -> Any:
        return telling(frozen(module, frozen_parameters), told)

    loaded = _imported(made, ready(made.module), inputs.given, told, options)
    return replace(
        loaded,
        build=functools.cache(lambda: ready(build(made))),
        given=None,
        reload=None,
        dtype=options.dtype,
        precision=options.precision,
        proof=options.proof,
        notes=(
            _sized(loaded.graph, inputs.options),
            *made.notes,
            *_told(told),
            *_idle(loaded.graph),
            *loaded.notes,
        ),
    )


def _imported(
    made: Configured,
    module: Any,
    given: Mapping[str, Any],
    told: Mapping[str, Any],
    options: ModelOptions,
) -> LoadedModel:
    """The import of a module, with tokens that have values where it depends on them."""
    plain = replace(options, dims={}, dtype=None)
    loaded = load_model(module, plain, {**given, **made.constants})
    values = placed(made, given, told, loaded.graph)
    return _with_values(loaded, values) if values else loaded


def _copies(path: str, options: ModelOptions) -> SmallCopies:
    """Small copies of a configuration's type, all of whose parameters are trained."""
    file = read_configuration(path)
    plain = replace(options, batch=None, precision=None)

    def copy_of(small: File, names: Sequence[str]) -> LoadedModel:
        import torch

        made, module = drawn(small)
        given = small_inputs(made, names)
        told = told_sizes(made, given)
        empty = {name: torch.zeros_like(value, device="cpu") for name, value in given.items()}
        loaded = _imported(made, telling(module, told), empty, told, plain)
        return _with_values(loaded, {**given, **placed(made, given, told, loaded.graph)})

    return SmallCopies(
        kind=file.kind,
        of=lambda graph: (
            partial(copy_of, small, graph.inputs) for small in small_files(file, graph)
        ),
    )


def _with_values(loaded: LoadedModel, values: Mapping[str, Any]) -> LoadedModel:
    """The model with values of some example inputs, which others must fit."""
    assert loaded.inputs is not None and loaded.call is not None
    named = zip(loaded.graph.inputs, loaded.inputs, strict=True)
    args, kwargs = loaded.call
    return loaded.with_inputs(
        tuple(values.get(name, value) for name, value in named), (args, {**kwargs, **values})
    )


def empty_inputs(sizes: Mapping[str, Sized]) -> dict[str, Any]:
    """Tensors of these shapes and types on the meta device: a file may give any shapes."""
    import torch

    return {
        name: torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta")
        for name, each in sizes.items()
    }


def is_configuration(model: Any) -> bool:
    """Whether a MODEL is `hf:path/config.json`."""
    return isinstance(model, str) and model.startswith(PREFIX)


def frozen(module: Any, patterns: Sequence[str]) -> Any:
    """The module, with parameters frozen that a pattern names."""
    for pattern in patterns:
        named = [
            value for name, value in module.named_parameters() if fnmatch.fnmatchcase(name, pattern)
        ]
        if not named:
            raise UsageError(f"no parameter of the model is named {pattern!r}")
        for value in named:
            value.requires_grad_(False)
    return module


def _sized(graph: Graph, options: Sequence[str]) -> str:
    parameters = sum(tensor.size for tensor in graph.parameters)
    shapes = [
        f"{name} {' x '.join(map(str, graph.tensors[name].shape))}"
        for name in graph.inputs
        if name != "labels" or "input_ids" not in graph.inputs
    ]
    return (
        f"{graph.name}: {count_text(parameters)} parameters; a batch is {', '.join(shapes)} "
        f"({', '.join(['--batch', *options])})"
    )


def _told(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {value[0].tolist()} for every image: a constant of the plan, no input"
        for name, value in values.items()
    ]


def _idle(graph: Graph) -> list[str]:
    """Tell which parts of the model take no part in such a batch, as towers for images."""
    read = {name for operator in graph.operators for name in operator.inputs}
    idle: dict[str, int] = {}
    for tensor in graph.parameters:
        if tensor.name not in read:
            part = ".".join(tensor.name.split(".")[:2])
            idle[part] = idle.get(part, 0) + tensor.size
    return [
        f"{part} ({count_text(size)} parameters) takes no part in such a batch: it is "
        "stored, not computed"
        for part, size in idle.items()
    ]
