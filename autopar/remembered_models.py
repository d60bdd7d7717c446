"""Models of files, remembered on disk: planning one again reads and executes nothing of it.

A graph and its notes are remembered, of a configuration and of an ONNX file. What a run needs
beside them is loaded when it is first asked for, and must then have the same graph.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .errors import ModelError
from .frontends.load import ModelOptions, finished
from .ir import Graph, graph_of, text_of
from .ir.value_texts import value_text
from .model import LoadedModel
from .remembered import folder_of_answers, key_of, recalled, remember, source_of

_ROOMS = (
    *("ir", "torch_operators", "frontends", "raising"),
    *("model.py", "configured.py", "remembered_models.py"),
)
"""The code of this package that makes graphs of files."""
Besides = Mapping[str, tuple[int, int]]
"""Files beside a model's: the bytes and the time of change of each, -1 of one that is missing."""
_STORED = TypeAdapter(tuple[str, tuple[str, ...], dict[str, tuple[int, int]]])
"""A graph without an added loss, as a text, the notes for the user, and the files beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The file that a model is read from.

    `content`: its bytes, or a digest of them. `packages`: those that make a graph of it. `besides`:
    further files of a loaded model, on which its graph may depend. `weights`: whether the file
    holds weights.
    """

    path: str
    content: bytes
    packages: tuple[str, ...]
    besides: Callable[[], Iterable[Path]] = tuple
    weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A model that is asked for.

    `further`: what its graph depends on beside the file and the options.
    """

    source: Source
    options: ModelOptions
    further: Any = None

    @property
    def key(self) -> str:
        """The key of its graph, which no precision and no loss are part of yet."""
        source = self.source
        options = replace(self.options, precision=None, loss=None, proof=None)
        asked = value_text((source.path if source.weights else "", options, self.further))
        parts = (asked, source.content, source_of(*_ROOMS))
        return key_of("graph", parts, source.packages)


def content_digest(path: Path) -> bytes:
    """The digest of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def remembered_model(
    asked: Asked, load: Callable[[], LoadedModel], equal: Callable[[Graph], Asked] | None = None
) -> LoadedModel:
    """The model that `load` gives for what is asked, or has given before.

    `equal`: another way to ask for a loaded model of that graph.
    """
    # The code of a user's function may change.
    if asked.options.loss is not None or folder_of_answers() is None:
        return load()
    known = _known(asked.key)
    if known is not None:
        graph, notes = known
        return _recalled(graph, notes, asked.source, asked.options, load)
    loaded = load()
    _remember(asked, loaded)
    if equal is not None:
        _remember(equal(loaded.source), loaded)
    return loaded


def _recalled(
    imported: Graph,
    notes: tuple[str, ...],
    source: Source,
    options: ModelOptions,
    load: Callable[[], LoadedModel],
) -> LoadedModel:
    graph = finished(imported, options)

    @functools.cache
    def whole() -> LoadedModel:
        return _same(load(), imported, source.path)

    def weights() -> Iterator[tuple[str, Any]]:
        stored = whole().weights
        return iter(()) if stored is None else stored()

    return LoadedModel(
        graph=graph,
        source=imported,
        imported=lambda: whole().imported(),
        build=None if source.weights else lambda: whole().module,
        weights=weights if source.weights else None,
        file=source.path if source.weights else None,
        at_sizes=lambda *asked, **typed: _at_sizes(whole(), *asked, **typed),
        notes=notes,
        dtype=options.dtype,
        precision=options.precision,
        proof=options.proof,
        values=options.values,
        outputs=tuple(options.outputs),
    )


def _at_sizes(loaded: LoadedModel, *asked: Any, **typed: Any) -> LoadedModel:
    if loaded.at_sizes is None:
        raise ModelError(f"{loaded.graph.name} cannot be read at other sizes")
    return loaded.at_sizes(*asked, **typed)


def _known(key: str) -> tuple[Graph, tuple[str, ...]] | None:
    text = recalled(key)
    if text is None:
        return None
    try:
        graph, notes, besides = _STORED.validate_json(text)
        if _about(map(Path, besides)) != besides:
            return None
        return graph_of(graph), notes
    except (ValidationError, ValueError):
        # A file that others have written there is not what is remembered.
        return None


def _remember(asked: Asked, loaded: LoadedModel) -> None:
    try:
        graph = text_of(loaded.source)
    except ValueError:
        return
    remember(asked.key, json.dumps((graph, loaded.notes, _about(asked.source.besides()))))


def _about(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """The bytes and the time of change of each file."""
    told = {}
    for path in paths:
        try:
            about = path.stat()
            told[str(path)] = about.st_size, about.st_mtime_ns
        except OSError:
            told[str(path)] = -1, -1
    return told


def _same(loaded: LoadedModel, imported: Graph, path: str) -> LoadedModel:
    # The whole graph, as a run uses its constants, too.
    if text_of(loaded.source) != text_of(imported):
        raise ModelError(
            f"{path}: its graph is not the one that is remembered; autopar cache clear forgets it"
        )
    return loaded
