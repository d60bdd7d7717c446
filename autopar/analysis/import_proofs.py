"""Proofs of imports, made once for a model and remembered under what they rest on.

What was read is run beside what was written (`autopar.runtime.import_proof`) before it is planned.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.model import LoadedModel, checks_by_default
from autopar.remembered import key_of, recalled, remember, source_of

_ROOMS = (
    "ir",
    "torch_operators",
    "frontends",
    "configured.py",
    "runtime/import_proof",
    "runtime/operators",
    "runtime/models",
)
"""The code of this package that a proof rests on."""
_PACKAGES = ("autopar", "torch", "numpy", "onnx", "onnxruntime", "transformers", "diffusers")
LEFT_OUT = "the import is not proved: the proof was left out (--no-proof)"
_proofs: dict[str, str] = {}


def proof_of(model: LoadedModel, *, runs: bool = False) -> str:
    """The outcome of the proof of a model's import, in words; it is made where there is none yet.

    An ONNX model is proved where it is asked for, or where the model `runs` and torch is at hand.
    Raises `ModelError` where the graph computes something else than the model.
    """
    if model.weights is not None and model.proof is None and not runs:
        return ""
    wanted = checks_by_default() if model.proof is None else model.proof
    if not wanted:
        return LEFT_OUT
    key = _key(model)
    said = _proofs.get(key) or recalled(key) if key else None
    if said is None:
        from autopar.runtime.import_proof import prove_import

        said = prove_import(model).said
        if key:
            remember(key, said)
    if key:
        _proofs[key] = said
    return said


def _key(model: LoadedModel) -> str | None:
    """The key of a proof: the graph and the code of the model; None where that is not known."""
    parts = [*_about(model), *(source_of(room) for room in _ROOMS)]
    if model.given is not None:
        code = list(_code_of(model.given))
        if None in code:
            return None
        parts += [str(part) for part in code]
    return key_of("proof", parts, _PACKAGES)


def _about(model: LoadedModel) -> list[str]:
    """The subject of a proof: one graph, or all of a type with the same kinds of operators."""
    graph = model.source
    if model.small is None or model.loss is not None:
        return [graph.fingerprint()]
    kinds = sorted({operator.kind for operator in graph.operators})
    return [model.small.kind, *graph.inputs, *kinds]


def _code_of(module: Any) -> Iterator[str | None]:
    """The files of the classes of a module and its parts, with the time of their last change."""
    kinds = {type(part): None for part in module.modules()}
    for kind in kinds:
        if kind.__module__.startswith("torch."):
            continue
        try:
            path = Path(inspect.getfile(kind))
            yield f"{kind.__qualname__} {path} {path.stat().st_mtime_ns}"
        except (TypeError, OSError):
            # Classes of an interactive session have no file.
            yield None
