"""Reads a `config.json`, and leaves out of it what does not describe the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ModelError
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.reading import read_bytes, read_json_object

PREFIX = "hf:"
"""The beginning of a MODEL that is a configuration."""
DTYPE = "bfloat16"
"""The type of a configured model where none is asked for."""
_NAME = "config.json"
MOST = 2**40
"""The largest whole number that a configuration may give."""
MOST_MODULES = 1024
"""The most layers or experts: each may be a module, which takes a millisecond to make."""
_COUNTED = ("layers", "depth", "n_layer", "num_blocks", "experts")
"""Parts of the keys that count modules."""
_LEFT_OUT = (
    "quantization_config",
    "auto_map",
    "torch_dtype",
    "dtype",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "use_kernels",
)
"""Keys of stored weights, of foreign code and of kernels, also in nested tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """The keys of a configuration, and what was left out of it.

    `stored`: how the weights are quantised in files, `code`: the repository's own code.
    """

    path: Path
    keys: Mapping[str, Any]
    stored: str | None
    code: str | None

    @property
    def kind(self) -> str:
        """The type that it names, or the class."""
        return str(self.keys.get("model_type") or self.keys.get("_class_name"))

    @property
    def folder(self) -> Path:
        """Where the weights lie, if there are any."""
        return self.path.parent


def read_configuration(path: str | Path) -> File:
    """Read a `config.json`, or the one in a folder; raise `ModelError` if it is none."""
    path = _file_at(Path(path))
    data = read_json_object(path, CONFIGURATION_BYTES, what="configuration", error=ModelError)
    _require_sizes(path, data)
    quantised = data.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    code = data.get("auto_map")
    return File(
        path=path,
        keys=plain_keys(data),
        stored=str(method or "quantised") if quantised else None,
        code=str(next(iter(code.values()), "")) if isinstance(code, dict) else None,
    )


def content_of(path: str | Path) -> bytes:
    """The content of a configuration's file; raises as `read_configuration`."""
    return read_bytes(
        _file_at(Path(path)), CONFIGURATION_BYTES, what="configuration", error=ModelError
    )


def _file_at(path: Path) -> Path:
    if not path.is_dir():
        return path
    # The folder of a whole pipeline of diffusers has its network in a folder of its own.
    own = path / _NAME
    return own if own.exists() else next(path.glob(f"transformer/{_NAME}"), own)


def plain_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys without those that are left out, in nested tables too."""
    return {
        str(key): plain_keys(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if key not in _LEFT_OUT
    }


def _require_sizes(path: Path, data: Any, key: str = "") -> None:
    """A `ModelError` for numbers that no model has: a module of that size would fill the memory."""
    if isinstance(data, dict):
        for name, value in data.items():
            _require_sizes(path, value, str(name))
    elif isinstance(data, list):
        for value in data:
            _require_sizes(path, value, key)
    elif isinstance(data, int):
        most = MOST_MODULES if any(word in key for word in _COUNTED) else MOST
        if abs(data) > most:
            raise ModelError(f"{path}: {key} is {data}; at most {most} is a size of a model")
