"""Models of configurations, remembered on disk: planning one again executes none of its code.

A graph and its notes are remembered. What a run needs beside them is loaded when it is first asked
for, and must then have the same graph.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

from pydantic import TypeAdapter, ValidationError

from .errors import ModelError
from .frontends.huggingface import content_of
from .frontends.load import ModelOptions, finished
from .ir import Graph, graph_of, text_of
from .model import LoadedModel
from .remembered import key_of, recalled, remember, source_of

_PACKAGES = ("autopar", "torch", "transformers", "diffusers")
_ROOMS = ("ir", "torch_operators", "frontends", "model.py", "configured.py")
"""The code of this package that makes graphs of configurations."""
_STORED = TypeAdapter(tuple[str, tuple[str, ...]])
"""A graph without an added loss, as a text, and the notes for the user."""


def remembered_model(
    path: str,
    options: ModelOptions,
    frozen_parameters: Sequence[str],
    load: Callable[[], LoadedModel],
) -> LoadedModel:
    """The model that `load` gives for a configuration and these options, or has given before."""
    if options.loss is not None:
        # The code of a user's function may change.
        return load()
    key = _key(path, options, frozen_parameters)
    known = _known(key)
    if known is None:
        loaded = load()
        _remember(key, loaded)
        return loaded
    source, notes = known
    graph = finished(source, options)
    whole = functools.cache(lambda: _same(load(), graph, path))
    return LoadedModel(
        graph=graph,
        source=source,
        imported=lambda: whole().imported(),
        build=lambda: whole().module,
        notes=notes,
        dtype=options.dtype,
        precision=options.precision,
    )


def _key(path: str, options: ModelOptions, frozen_parameters: Sequence[str]) -> str:
    asked = (sorted(options.dims.items()), options.batch, options.dtype, options.train)
    asked_text = repr((*asked, tuple(frozen_parameters)))
    return key_of(("graph", asked_text, content_of(path), *source_of(*_ROOMS)), _PACKAGES)


def _known(key: str) -> tuple[Graph, tuple[str, ...]] | None:
    text = recalled(key)
    if text is None:
        return None
    try:
        graph, notes = _STORED.validate_json(text)
        return graph_of(graph), notes
    except (ValidationError, ValueError):
        # A file that others have written there is not what is remembered.
        return None


def _remember(key: str, loaded: LoadedModel) -> None:
    try:
        graph = text_of(loaded.source)
    except ValueError:
        return
    remember(key, json.dumps((graph, loaded.notes)))


def _same(loaded: LoadedModel, graph: Graph, path: str) -> LoadedModel:
    if loaded.graph.fingerprint() != graph.fingerprint():
        raise ModelError(
            f"{path}: its graph is not the one that is remembered; empty the folder of answers "
            "(~/.cache/autopar, or AUTOPAR_CACHE)"
        )
    return loaded
